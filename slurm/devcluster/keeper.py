"""The machine of one node: whatever a job starts stays its descendant, so that the node can be killed as a whole.

Owns: one slurmd, started at once and again on SIGUSR1. As a *child subreaper* it inherits every process of the node whose
parent ends: slurmstepd, and what a job detaches with setsid or a double fork. Never: ends a process itself. Invariant: as
long as the keeper lives, the processes of its node are its descendants. See prctl(2), PR_SET_CHILD_SUBREAPER.

Run as ``python keeper.py NODE CONFIGURATION SLURMD MARK``; imports nothing of its package, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ENDED = "keeper: slurmd ended with status"
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def keep(node: str, configuration: str, slurmd: str, mark: str) -> None:
    """Run slurmd of ``node`` and collect what ends, until killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # Blocked and taken with sigwait: a signal between two statements is not lost.
    awaited = {signal.SIGUSR1, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    name, _, value = mark.partition("=")
    environment = {**os.environ, name: value}
    daemon = 0
    wanted = True
    while True:
        if wanted and not daemon:
            daemon = _start([slurmd, "-D", "-f", configuration, "-N", node], environment, libc)
        wanted = False
        if signal.sigwait(awaited) == signal.SIGUSR1:
            wanted = True
        for ended, status in _collect():
            if ended == daemon:
                daemon = 0
                print(f"{ENDED} {os.waitstatus_to_exitcode(status)}", flush=True)


def _start(command: list[str], environment: dict[str, str], libc: ctypes.CDLL) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        # Without its keeper the node could not be killed as a whole: then it should not run.
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.execve(command[0], command, environment)
    finally:
        os._exit(127)


def _collect() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


if __name__ == "__main__":
    keep(*sys.argv[1:])
