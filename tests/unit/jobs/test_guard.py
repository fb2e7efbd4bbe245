"""The guard: the child's exit status, its signals, and its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """\
import os, signal, sys, time
from milesbatch.jobs.guard import run_guarded

def control():
    print("child", os.getpid(), flush=True)
    what = sys.argv[1]
    if what == "exit":
        return 7
    if what == "heed":
        got = []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda n, f: got.append(n))
        print("ready", flush=True)
        while len(got) < 2:
            time.sleep(0.01)
        return sum(got)
    print("ready", flush=True)
    time.sleep(60)
    return 1

sys.exit(run_guarded(control, lambda number: 100 + number))
"""


def start(tmp_path: Path, what: str) -> tuple[subprocess.Popen[str], int]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), what], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    if what != "exit":
        process.stdout.readline()
    return process, child


def test_the_exit_status_is_the_controllers(tmp_path: Path) -> None:
    process, child = start(tmp_path, "exit")
    assert child != process.pid
    assert process.wait(20) == 7


def test_signals_are_handed_on(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "heed")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == signal.SIGTERM + signal.SIGUSR1


def test_a_warning_before_anybody_handles_it_kills_nobody(tmp_path: Path) -> None:
    process, child = start(tmp_path, "sleep")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert process.poll() is None and Path(f"/proc/{child}").exists()
    os.kill(child, signal.SIGKILL)
    process.wait(20)


def test_a_killed_controller_is_noticed(tmp_path: Path) -> None:
    process, child = start(tmp_path, "sleep")
    os.kill(child, signal.SIGKILL)
    assert process.wait(20) == 100 + signal.SIGKILL


def test_the_controller_does_not_outlive_its_guard(tmp_path: Path) -> None:
    process, child = start(tmp_path, "sleep")
    process.kill()
    process.wait(20)
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
