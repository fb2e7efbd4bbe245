"""What every role process does first and last: know who it is, die with its parent, and end with one clear error.

What it prints goes to its log, each line with its time (``cluster/stamps.py``).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from milesbatch.cluster.context import RoleContext, fault_plan_path, narrow_devices
from milesbatch.cluster.local import die_with_parent
from milesbatch.cluster.stamps import stamp_output, start_line
from milesbatch.errors import EXIT_NO_RESTART, MilesbatchError
from milesbatch.faults.injector import arm_from
from milesbatch.store.layout import RunLayout


def run_role(main: Callable[[RoleContext], None]) -> NoReturn:
    """Run a role's ``main`` and exit. Expected errors end as one ``error:`` text, which the controller reads from the log;
    anything else ends as a traceback there."""
    stamp_output()
    faulthandler.enable()
    # The controller decides about stopping; a terminal's Ctrl-C reaches the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 0
    try:
        context = RoleContext.from_environment()
        die_with_parent(context.parent_pid)
        print(start_line(context.name, context.attempt, socket.gethostname(), os.getpid()), flush=True)
        narrow_devices(context.device_slice)
        arm_from(fault_plan_path(), context.name, RunLayout(context.run_directory))
        main(context)
    except MilesbatchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code if error.may_restart else EXIT_NO_RESTART
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is committed and closed; tearing the interpreter down would keep the allocation for seconds.
    os._exit(code)
