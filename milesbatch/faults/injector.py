"""Makes the faults of a plan happen in this process, and records that each one has fired.

A fault fires once in the life of the run: ``events/fault.NAME.fired`` is created exclusively (and made durable) just before it
acts, so that a process that was started again does not run into the same fault for ever, and a test can prove that the
fault really happened.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from milesbatch.errors import RunFailedError
from milesbatch.faults import points
from milesbatch.faults.operations import FaultyOperations
from milesbatch.faults.plan import Fault, FaultPlan, load_plan
from milesbatch.store.clock import utc_now
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import install


class Injector:
    """The faults of one process."""

    def __init__(self, plan: FaultPlan, process: str, layout: RunLayout) -> None:
        self._process = process
        self._layout = layout
        self._faults = [fault for fault in plan.faults if fault.is_for(process)]
        self._passed: Counter[str] = Counter()
        self._failing: dict[str, tuple[int, int]] = {}
        self.partitioned_until_s = 0.0

    def arm(self) -> None:
        """From now on, faults happen in this process."""
        if self._faults:
            points.set_hook(self.at)
            install(FaultyOperations(self._layout.root, self.at, self.error_at, self.damage_at))

    def at(self, name: str) -> None:
        """The process is at point ``name``."""
        if name == "wire.send" and time.monotonic() < self.partitioned_until_s:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused by a fault plan")
        self._passed[name] += 1
        for fault in self._due(name, ("kill", "stop", "exit", "raise", "delay", "partition")):
            if self._fire(fault):
                self._act(fault)

    def error_at(self, name: str) -> int | None:
        """Error number with which the operation at ``name`` must fail, if it must."""
        if name in self._failing:
            number, left = self._failing.pop(name)
            if left > 1:
                self._failing[name] = (number, left - 1)
            return number
        for fault in self._due(name, ("enospc", "eio")):
            if self._fire(fault):
                number = errno.ENOSPC if fault.action == "enospc" else errno.EIO
                if fault.times > 1:
                    self._failing[name] = (number, fault.times - 1)
                return number
        return None

    def damage_at(self, name: str, path: Path) -> None:
        """The file ``path`` was just committed: damage it, if it must be."""
        for fault in self._due(name, ("flip", "truncate")):
            if self._fire(fault, path):
                damage(path, fault)

    def _due(self, name: str, actions: tuple[str, ...]) -> list[Fault]:
        return [f for f in self._faults if f.point == name and f.nth == self._passed[name] and f.action in actions]

    def _fire(self, fault: Fault, path: Path | None = None) -> bool:
        """Record that ``fault`` happens now; False when it has happened before."""
        body = {"fault": fault.name, "process": self._process, "pid": os.getpid(), "at": utc_now()}
        if path is not None:
            body["path"] = str(path)
        try:
            descriptor = os.open(fired_path(self._layout, fault.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump(body, stream)
        print(f"fault {fault.name}: {fault.action} at {fault.point}", file=sys.stderr, flush=True)
        return True

    def _act(self, fault: Fault) -> None:
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "exit":
            os._exit(fault.exit_code)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "partition":
            self.partitioned_until_s = time.monotonic() + fault.seconds
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused by a fault plan")
        else:
            raise RunFailedError(f"fault {fault.name} of the fault plan", mend="nothing: it was asked for")


def damage(path: Path, fault: Fault) -> None:
    """Flip a bit in the middle of a file, or cut it in half, as a failing disk would: behind everybody's back."""
    data = bytearray(path.read_bytes())
    if fault.action == "flip":
        data[len(data) // 2] ^= 0x10
    else:
        del data[len(data) // 2 :]
    path.write_bytes(bytes(data))


def fired_path(layout: RunLayout, name: str) -> Path:
    """The record that a fault has fired."""
    return layout.events / f"fault.{name}.fired"


def arm_from(plan_path: Path | None, process: str, layout: RunLayout) -> None:
    """Arm the plan at ``plan_path`` for this process; None: nothing happens.

    Raises:
        InputError: the plan cannot be used.
    """
    if plan_path is not None:
        Injector(load_plan(plan_path), process, layout).arm()
