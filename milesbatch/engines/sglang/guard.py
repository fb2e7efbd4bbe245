"""Keeps one server and everything that it starts; a process of its own: ``python -m milesbatch.engines.sglang.guard``.

    worker ──(pipe on stdin)── guard ── server ── scheduler, detokenizer, …

Owns the end of these processes. Standard library only, one thread. Invariant: when the worker is gone, however it
ended, the pipe is closed by the kernel, and the guard kills all its descendants: it is their subreaper (prctl(2)), so
that none gets out of sight. Should the guard itself be killed, the server has asked the kernel to die with it, and
SGLang's own processes with the server; what these shared is then removed by the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.2
_GRACE_S = 10.0
"""For which a server that is told to end in peace may go on."""
_KILL_S = 30.0
_TRACKER_S = 1.0
END, OVER = b"e", b"o"
"""What the worker may say: end the server in peace; end it, and nobody needs its directory any more."""


def main(rubbish: str, command: list[str]) -> int:
    """Run ``command`` until it ends, or stdin closes, or the byte ``e`` comes (end in peace); then remove
    ``rubbish``."""
    worker = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a whole step may be told to end: the worker decides when
    server = _start(command, libc)
    is_over = False
    try:
        code, is_over = _watch(server)
        return code
    finally:
        _kill_descendants()
        if rubbish and (is_over or os.getppid() != worker):  # else a worker that lives may still need it
            shutil.rmtree(rubbish, ignore_errors=True)


def _start(command: list[str], libc: ctypes.CDLL) -> int:
    guard = os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _watch(server: int) -> tuple[int, bool]:
    """The server's exit status (128 and the signal's number when one ended it), or 0 when it is to be ended from here;
    and whether the worker has said that all is over."""
    killed_at_s = float("inf")
    while True:
        status = _reap(server)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return (128 - code if code < 0 else code), False
        if time.monotonic() > killed_at_s:
            return 0, False
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        word = os.read(0, 1)
        if word != END:  # nothing is said any more: the worker is gone
            return 0, word == OVER
        os.kill(server, signal.SIGTERM)
        killed_at_s = time.monotonic() + _GRACE_S


def _reap(server: int) -> int | None:
    """Take leave of all children that ended; the server's status when it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                found = status
    return found


def _kill_descendants() -> None:
    """All of them are children of this process in the end; nobody is left when this returns, unless the kernel holds
    it.

    Python's resource trackers end by themselves when those that they serve are gone, and take shared memory away with
    them; they get a moment for that.
    """
    shared = shared_memory(os.getpid())
    began_s = time.monotonic()
    while _has_children() and time.monotonic() < began_s + _KILL_S:
        for pid in _descendants(os.getpid()):
            if time.monotonic() < began_s + _TRACKER_S and _is_tracker(pid):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for path in shared:
        path.unlink(missing_ok=True)


def _has_children() -> bool:
    """After taking leave of those that ended. Whoever loses its parent becomes a child of this process."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def shared_memory(root: int) -> set[Path]:
    """Files that SGLang's processes below ``root`` share and that nobody removes after SIGKILL."""
    found = set()
    for pid in _descendants(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith(("/dev/shm/sglang_", "/dev/shm/sgl_")):
                    found.add(Path(path))
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descendants(root: int) -> list[int]:
    """Zombies too: one that has only lost its first thread still runs, and has children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, look = [], [root]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
