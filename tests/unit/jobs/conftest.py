"""Slurm's commands with prepared answers, and nothing else of Slurm, for every test here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prepared_slurm import PreparedSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    made = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(made.path))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return made
