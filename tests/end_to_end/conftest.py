"""A finished run that was never disturbed: what every disturbed run must equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command import QUICK, milesbatch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes on a machine of unknown load: a time limit only ends what hangs."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Directory of the run; its command's stderr is in ``stderr.txt`` beside it."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, cache=cache)
    assert ended.code == 0, ended.err
    (run.parent / "stderr.txt").write_text(ended.err)
    return run
