"""A model and an unbroken run that are made once, and that every test process of a session may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parent / "crash"))

from broken_runs import STOPPED_AT, STOPPED_SETTINGS, check_clear, fired, made_once, plan
from command import QUICK, milesbatch

from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.trainer.retiring import Retiring

COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Notes what was collected, the deselected included. Real processes on a machine of unknown load: a time limit only ends
    what hangs."""
    config.stash[COLLECTED] = frozenset(
        str(Path(item.fspath)) + "::" + getattr(item, "originalname", "") for item in items
    )
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> frozenset[str]:
    """Tests of this session, also those that it does not run: ``path of the file::function``."""
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all test processes of this session see."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "faults"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def cache(shared: Path) -> Path:
    return shared / "cache"


@pytest.fixture(scope="session")
def unbroken(shared: Path, cache: Path) -> Path:
    """The run that a broken one must equal in the end: the same recipe, undisturbed."""

    def make(directory: Path) -> None:
        ended = milesbatch("run", QUICK, "--run-dir", directory / "run", cache=cache)
        assert ended.code == 0, ended.err

    return made_once(shared / "unbroken", make) / "run"


@pytest.fixture(scope="session")
def stopped(shared: Path, cache: Path) -> Path:
    """A run that lost its trainer in step 6: checkpoints 3 and 4, versions 0 (retired) to 5, and files of step 7 that wait."""

    def make(directory: Path) -> None:
        moment = {"role": "trainer-0", "point": "trainer.recorded", "nth": STOPPED_AT}
        wait = {**moment, "action": "delay", "seconds": 3}  # the files of step 7 are written meanwhile
        faults = plan(directory / "plan.yaml", wait, {**moment, "action": "kill"})
        settings = (*STOPPED_SETTINGS, "--set", "slurm.max_restarts_without_progress=0")
        ended = milesbatch("run", QUICK, "--run-dir", directory / "run", *settings, cache=cache, faults=faults)
        check_clear(ended, 1, "trainer-0 on ", " died ", "SIGKILL")
        assert len(fired(directory / "run")) == 2
        retire(RunLayout(directory / "run"))

    return made_once(shared / "stopped", make) / "run"


def retire(layout: RunLayout) -> None:
    """Retire what the trainer would have, had it known by then which versions the workers hold; that is a matter of time."""
    Retiring(layout, open_run(layout, 1).recipe, Fence(layout, 1)).retire(STOPPED_AT - 2, STOPPED_AT - 1)
    assert layout.weights_retirement(0).exists()
