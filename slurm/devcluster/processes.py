"""Which processes are the cluster's, read from the processes themselves.

Owns: finding, signalling and ending them. Never: trusts a pid file. Invariant: a signal goes only to a process that carried the
cluster's mark (or descends from one that did) when it was looked at, held by a pidfd, so that a reused pid is never hit; see
pidfd_open(2) and proc(5).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "MILESBATCH_CLUSTER_PART"
_PROC = Path("/proc")
_RENAMED = ("slurmstepd", "slurmscriptd")


@dataclass(frozen=True)
class Process:
    """One process as the kernel described it: ``started`` is in clock ticks since boot, and tells pids apart."""

    pid: int
    parent: int
    state: str
    command: str
    started: int


def look(pid: int) -> Process | None:
    """The process with this id, or nothing when it is gone or only waits to be collected (a zombie)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command is in parentheses and may hold spaces and parentheses itself.
    opening, closing = text.index("("), text.rindex(")")
    fields = text[closing + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), fields[0], text[opening + 1 : closing], int(fields[19]))


def table() -> dict[int, Process]:
    """All living processes of the machine by id, but the calling one and its ancestors: a command never ends itself."""
    looked = (look(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    found = {process.pid: process for process in looked if process is not None}
    own = found.pop(os.getpid(), None)
    while own is not None:
        own = found.pop(own.parent, None)
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty when it is gone or another user's."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="surrogateescape").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def marked(folder: Path, processes: Iterable[Process]) -> dict[str, list[Process]]:
    """Part (``munged``, ``slurmctld``, ``keeper/NODE``, ``slurmd/NODE``, ``job/NODE``) -> its processes, oldest first."""
    found: dict[str, list[Process]] = {}
    for process in sorted(processes, key=lambda process: (process.started, process.pid)):
        if part := _part(str(folder), process):
            found.setdefault(part, []).append(process)
    return found


def _part(folder: str, process: Process) -> str:
    """Daemons carry the mark that they were started with.

    slurmstepd and slurmctld's helper write their title over it, and are known by where slurmd and slurmctld were started.
    Processes of jobs have what Slurm gives them: this cluster's ``SLURM_CONF`` together with a node's name.
    """
    variables = environment(process.pid)
    root, _, part = variables.get(MARK, "").rpartition(":")
    if root:
        return part if root == folder else ""
    if process.command in _RENAMED:
        directory = _working_directory(process.pid)
        if directory.startswith(f"{folder}/spool/"):
            return "job/" + directory.removeprefix(f"{folder}/spool/")
        return "slurmctld-helper" if directory == f"{folder}/state" else ""
    if variables.get("SLURM_CONF") == f"{folder}/etc/slurm.conf" and "SLURMD_NODENAME" in variables:
        return "job/" + variables["SLURMD_NODENAME"]
    return ""


def _working_directory(pid: int) -> str:
    try:
        return str((_PROC / str(pid) / "cwd").readlink())
    except OSError:
        return ""


def with_descendants(roots: Iterable[Process], processes: dict[int, Process]) -> list[Process]:
    """The roots and all that descends from them, each once."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        process = waiting.pop()
        if process.pid not in found:
            found[process.pid] = process
            waiting.extend(children.get(process.pid, []))
    return list(found.values())


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process; nothing when it has ended in the meantime."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor holds whoever has the pid now: it is the one meant only if it started at the same tick.
        now = look(process.pid)
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def send_until(
    number: signal.Signals, find: Callable[[], list[Process]], done: Callable[[Process], bool], within_s: float = 10.0
) -> None:
    """Signal what ``find`` returns until all of it is ``done``: again, for new ones may appear in between.

    Raises:
        TimeoutError: some were left; names them.
    """
    deadline = time.monotonic() + within_s
    while left := [process for process in find() if not done(process)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{number.name} had no effect on {left}")
        for process in left:
            send(process, number)
        time.sleep(0.01)


def kill_all(find: Callable[[], list[Process]], within_s: float = 10.0) -> None:
    """SIGKILL what ``find`` returns until it returns nothing."""
    send_until(signal.SIGKILL, find, lambda process: False, within_s)


def end(find: Callable[[], list[Process]], within_s: float = 5.0) -> None:
    """SIGTERM once; SIGKILL what is still there after ``within_s`` seconds."""
    for process in find():
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + within_s
    while find() and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_all(find)
