"""One member of a broadcast as a process of its own, with an accident: RANK ADDRESS SIZE TIMEOUT_S POINT NTH ACTION.

Rank 0 founds the group and prints its address; the others enter it. ``ACTION`` (``kill`` or ``stop``) happens at the ``NTH``
passing of ``POINT``. It prints ``ready`` when it can begin, and then waits for a line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rounds_made import BUCKET, make_version

from milesbatch.broadcast.group import Group
from milesbatch.broadcast.header import header_of
from milesbatch.broadcast.rounds import receive, send
from milesbatch.faults.points import set_hook


def main(rank: int, address: str, size: int, timeout_s: float, at: str, nth: int, action: str) -> None:
    passed = 0

    def hook(name: str) -> None:
        nonlocal passed
        passed += name == at
        if name == at and passed == nth:
            print("now", flush=True)
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    set_hook(hook)
    group = Group.found("127.0.0.1", size, timeout_s) if rank == 0 else None
    print("ready", group.port if group is not None else "", flush=True)
    sys.stdin.readline()
    deadline_s = time.monotonic() + timeout_s
    if group is not None:
        manifest, tensors = make_version(1)
        send(group, 1, header_of(manifest, BUCKET), tensors, deadline_s)
    else:
        receive(Group.enter(address, rank, size, deadline_s), 1, deadline_s)


if __name__ == "__main__":
    rank, address, size, timeout_s, at, nth, action = sys.argv[1:]
    main(int(rank), address, int(size), float(timeout_s), at, int(nth), action)
