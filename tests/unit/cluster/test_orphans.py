"""What an earlier incarnation left behind on this machine is ended; nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from milesbatch.cluster.orphans import end_orphans


def sleeper(run: Path, incarnation: str) -> subprocess.Popen[bytes]:
    told = {"MILESBATCH_ROLE_RUN_DIRECTORY": str(run), "MILESBATCH_ROLE_INCARNATION": incarnation}
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_only_older_incarnations_of_this_run_are_ended(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "run2"
    processes = {
        "old": sleeper(run, "2"),
        "older": sleeper(run, "1"),
        "own": sleeper(run, "3"),
        "newer": sleeper(run, "4"),
        "another run": sleeper(other, "1"),
        "odd": sleeper(run, "x"),
        "stopped": sleeper(run, "1"),
    }
    os.kill(processes["stopped"].pid, signal.SIGSTOP)
    time.sleep(0.1)
    try:
        ended = end_orphans(run, 3)
        assert ended == sorted((processes["old"].pid, processes["older"].pid))
        assert processes["old"].wait(10) == processes["older"].wait(10) == -9
        assert all(processes[name].poll() is None for name in ("own", "newer", "another run", "odd", "stopped"))
        assert end_orphans(run, 3) == []
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_run_directory_is_known_by_its_real_path(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    link = tmp_path / "link"
    link.symlink_to(run)
    process = sleeper(run.resolve(), "1")
    try:
        assert end_orphans(link, 2) == [process.pid]
        process.wait(10)
    finally:
        process.kill()
        process.wait()
