"""The sound runs of the audit's tests, to be forked; the same files stand in for a run of any size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))

from audit_runs import STEPS, sound_run

from milesbatch.store.layout import RunLayout


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Six steps, checkpoints 4 and 6, keyframes 0, 3 and 6. Never changed: a fork only reads it."""
    return sound_run(tmp_path_factory.mktemp("forks") / "parent", steps=STEPS)
