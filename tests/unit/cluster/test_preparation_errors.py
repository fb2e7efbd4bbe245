"""What is said when the process that prepares a run ends without a word of its own: whatever was said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from milesbatch.errors import InputError, RunFailedError
from milesbatch.preparation import prepare
from milesbatch.store.layout import RunLayout


def ended_with(code: int, said: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"]


@pytest.mark.parametrize("code", [1, 2, 127])
def test_a_container_that_is_not_there_is_named(tmp_path: Path, code: int) -> None:
    said = "srun: error: task 0 launch failed: apptainer: No such file or directory"
    with pytest.raises(RunFailedError, match="apptainer: No such file") as caught:
        prepare(RunLayout(tmp_path), print, ended_with(code, said))
    assert "container" in caught.value.mend


def test_its_own_error_counts_whatever_srun_adds(tmp_path: Path) -> None:
    said = "error: no such data\n  what to do: look\nsrun: error: n1: task 0: Exited with exit code 2"
    with pytest.raises(InputError) as caught:
        prepare(RunLayout(tmp_path), print, ended_with(2, said))
    assert caught.value.what == "no such data\n  what to do: look"
