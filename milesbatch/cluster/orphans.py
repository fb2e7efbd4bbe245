"""Processes of an earlier incarnation that still live on this machine: found and ended at a take-over. Linux: ``/proc``.

The roles die with their controller; what a user's reward function has started does not when the controller is killed with
SIGKILL. Such a process has inherited the role's environment, which says whose it is. Never touches one that does not carry
this run's directory and an older incarnation, nor one that somebody has stopped (SIGSTOP, a debugger): that one does
nothing, and is fenced out when it goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_RUN = "MILESBATCH_ROLE_RUN_DIRECTORY"
_INCARNATION = "MILESBATCH_ROLE_INCARNATION"


def end_orphans(run_directory: Path, incarnation: int) -> list[int]:
    """SIGKILL to all processes of incarnations before ``incarnation`` of this run, on this machine; returns their ids."""
    ended = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_older(entry, str(run_directory.resolve()), incarnation):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    return sorted(ended)


def _is_older(entry: Path, run_directory: str, incarnation: int) -> bool:
    try:
        words = (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is another user's
    told = dict(word.decode(errors="replace").split("=", 1) for word in words if b"=" in word)
    number = told.get(_INCARNATION, "")
    is_older = told.get(_RUN) == run_directory and number.isdigit() and int(number) < incarnation
    return is_older and not _is_stopped(entry)


def _is_stopped(entry: Path) -> bool:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
