"""The outermost process of a batch script: the controller is its child.

Owns: handing signals on, and one case that the controller cannot handle itself: that it was killed (SIGKILL, out of
memory). Slurm takes that for a failed job and does not start it again; the guard asks for it. Never: anything while the
controller lives. Invariant: neither outlives the other; when the guard is killed, the kernel kills the controller.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from milesbatch.cluster.local import die_with_parent

_HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)


def run_guarded(control: Callable[[], int], when_killed: Callable[[int], int]) -> int:
    """Run ``control`` in a child; its exit status, or that of ``when_killed``, which gets the signal that killed it.

    Must be called before any thread was started.
    """
    parent = os.getpid()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, _HANDED_ON
    )  # one that comes now waits until there is somebody to hand it to
    child = os.fork()
    if child == 0:
        for number in _HANDED_ON:
            signal.signal(number, signal.SIG_DFL)
        # A warning that comes before the controller can act on it must not kill it: Slurm is asked for the time that is left.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
        die_with_parent(parent)
        os._exit(_flushed(control()))

    def hand_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _HANDED_ON:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
    _, status = os.waitpid(child, 0)
    for number in _HANDED_ON:
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else when_killed(-code)


def _flushed(code: int) -> int:
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    return code
