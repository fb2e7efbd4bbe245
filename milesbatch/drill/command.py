"""Starts ``milesbatch run`` as a user does, finds its processes, and kills them. Linux: children are found in ``/proc``.

Never looks into the run. Invariant: after :meth:`Command.kill_everything` none of its processes lives but those spared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from milesbatch.cluster.context import child_environment

_GONE_S = 30.0


class StartedRun(Protocol):
    """A run that was started: a command on this machine, or a submission (:mod:`milesbatch.drill.on_site`)."""

    @property
    def log(self) -> Path: ...
    def exit_code(self) -> int | None: ...
    def wait(self, timeout_s: float) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def children(self) -> list[int]: ...
    def kill_everything(self, spare: Collection[int] = ()) -> list[int]: ...


@dataclass(slots=True)
class Command:
    """A started ``milesbatch run``."""

    process: subprocess.Popen[bytes]
    log: Path

    def exit_code(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Exit code; None when it still runs after ``timeout_s``."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the controller alone."""
        self.process.kill()
        self.process.wait()

    def children(self) -> list[int]:
        """Process ids of its living children: the roles."""
        return [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _parent(e) == self.process.pid]

    def kill_everything(self, spare: Collection[int] = ()) -> list[int]:
        """SIGKILL to the controller and all of its children at once, as a power cut would; returns those that still live."""
        children = [pid for pid in self.children() if pid not in spare]
        self.process.kill()
        for pid in children:
            send(pid, signal.SIGKILL)
        self.process.wait()
        return still_alive(children)


def start_run(
    recipe: Path, run: Path, overrides: Sequence[str], log: Path, fault_plan: Path | None, threads: int = 1
) -> Command:
    """``milesbatch run RECIPE --run-dir RUN --set ...``; what it says goes to ``log``."""
    flags = [word for override in overrides for word in ("--set", override)]
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "milesbatch.cli.main", "run", str(recipe), "--run-dir", str(run), *flags],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=child_environment(threads, {"MILESBATCH_FAULTS": str(fault_plan or "")}),
            start_new_session=True,
        )
    return Command(process, log)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def still_alive(pids: Collection[int], timeout_s: float = _GONE_S) -> list[int]:
    """Those of ``pids`` that have not ended after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return alive


def is_alive(pid: int) -> bool:
    """A zombie in the kernel's sense has ended."""
    state = _stat(Path(f"/proc/{pid}"))
    return state is not None and state[0] not in ("Z", "X")


def _parent(entry: Path) -> int | None:
    state = _stat(entry)
    return int(state[1]) if state is not None and state[0] not in ("Z", "X") else None


def _stat(entry: Path) -> list[str] | None:
    """State, parent, ... of a process; None when there is none."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
