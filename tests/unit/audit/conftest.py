"""One sound run of each mode for the session; every test breaks a copy of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from audit_runs import sound_run

from milesbatch.store.layout import RunLayout


@pytest.fixture(scope="session")
def bitwise_run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return sound_run(tmp_path_factory.mktemp("audit") / "bitwise")


@pytest.fixture(scope="session")
def relaxed_run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return sound_run(tmp_path_factory.mktemp("audit") / "relaxed", "relaxed")


@pytest.fixture
def layout(bitwise_run: RunLayout, tmp_path: Path) -> RunLayout:
    return RunLayout(Path(shutil.copytree(bitwise_run.root, tmp_path / "run")))


@pytest.fixture
def relaxed(relaxed_run: RunLayout, tmp_path: Path) -> RunLayout:
    return RunLayout(Path(shutil.copytree(relaxed_run.root, tmp_path / "relaxed")))
