"""Copies of the weights on a host: none is left for ever, and none is taken from a living process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from milesbatch.errors import StorageError
from milesbatch.rollout.memory import LocalMemory

WORKER = """
import sys, time
from pathlib import Path
from milesbatch.rollout.memory import LocalMemory
memory = LocalMemory.take(Path(sys.argv[1]), "run.rollout-1", sys.argv[2])
(memory.directory / "staged").mkdir()
(memory.directory / "staged" / "model.safetensors").write_bytes(bytes(1000))
print("there", flush=True)
time.sleep(600)
"""


def start(base: Path, life: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(base), life], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "there\n"
    return worker


def names(base: Path) -> list[str]:
    return sorted(entry.name for entry in base.iterdir())


def test_what_a_killed_start_left_goes_at_the_next_one_and_what_lives_stays(tmp_path: Path) -> None:
    base = tmp_path / "memory"
    killed, living = start(base, ".i1.0"), start(base, ".i1.1")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    for other in ("run.rollout-10.i1.0", "run.rollout-0.i1.0", "another.rollout-1.i1.0", "run.rollout-1"):
        (base / other).mkdir()
    before = names(base)
    assert "run.rollout-1.i1.0" in before
    memory = LocalMemory.take(base, "run.rollout-1", ".i2.0")
    assert names(base) == sorted({*before, "run.rollout-1.i2.0"} - {"run.rollout-1.i1.0"})
    assert (base / "run.rollout-1.i1.1" / "staged" / "model.safetensors").exists()
    living.send_signal(signal.SIGKILL)
    living.wait()
    memory.close()
    assert not memory.directory.exists()
    LocalMemory.take(base, "run.rollout-1", ".i2.1").close()
    assert names(base) == ["another.rollout-1.i1.0", "run.rollout-0.i1.0", "run.rollout-1", "run.rollout-10.i1.0"]


def test_of_a_link_nothing_is_removed_that_it_leads_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    base = tmp_path / "memory"
    base.mkdir()
    (base / "run.rollout-1.i1.0").symlink_to(kept)
    LocalMemory.take(base, "run.rollout-1", ".i2.0").close()
    assert (kept / "file").read_text() == "mine"


def test_lives_that_share_one_directory_find_it_again(tmp_path: Path) -> None:
    first = LocalMemory.take(tmp_path, "run.rollout-1", "")
    (tmp_path / "run.rollout-1.i1.0").mkdir()
    second = LocalMemory.take(tmp_path, "run.rollout-1", "")
    assert first.directory == second.directory
    assert (tmp_path / "run.rollout-1.i1.0").exists()
    second.close()
    first.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("")
    with pytest.raises(StorageError, match="memory"):
        LocalMemory.take(tmp_path / "memory", "run.rollout-1", ".i1.0")


def test_nobody_else_may_look(tmp_path: Path) -> None:
    base = tmp_path / "memory"
    LocalMemory.take(base, "run.rollout-1", ".i1.0").close()
    assert base.stat().st_mode & 0o777 == 0o700
