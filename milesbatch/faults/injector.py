"""Makes the faults of a plan happen in this process, and records that each one has fired.

A fault fires once in the life of the run: ``events/fault.NAME.fired`` is created exclusively (and made durable) just before it
acts, so that a process that was started again does not run into the same fault for ever, and a test can prove that the
fault really happened.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from milesbatch.errors import RunFailedError
from milesbatch.faults import points
from milesbatch.faults.operations import FaultyOperations
from milesbatch.faults.plan import Fault, FaultPlan, load_plan
from milesbatch.store.clock import utc_now
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, install

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Injector:
    """The faults of one process."""

    def __init__(self, plan: FaultPlan, process: str, layout: RunLayout) -> None:
        self._process = process
        self._layout = layout
        self._faults = [fault for fault in plan.faults if fault.is_for(process)]
        self._lock = threading.Lock()  # a role works and sends heartbeats in two threads
        self._passed: Counter[str] = Counter()
        self._spent: set[str] = set()
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
        with self._lock:
            self._passed[name] += 1
        for fault in self._due(name, ("kill", "stop", "outlive", "exit", "raise", "delay", "partition")):
            if self._fire(fault):
                self._act(fault)

    def error_at(self, name: str) -> int | None:
        """Error number with which the operation at ``name`` must fail, if it must."""
        with self._lock:
            number, left = self._failing.pop(name, (None, 0))
            if number is not None:
                if left > 1:
                    self._failing[name] = (number, left - 1)
                return number
        for fault in self._due(name, ("enospc", "eio")):
            if self._fire(fault):
                number = errno.ENOSPC if fault.action == "enospc" else errno.EIO
                if fault.times > 1:
                    with self._lock:
                        self._failing[name] = (number, fault.times - 1)
                return number
        return None

    def damage_at(self, name: str, path: Path) -> None:
        """The file ``path`` was just committed: damage it, if it must be."""
        for fault in self._due(name, ("flip", "truncate")):
            if self._fire(fault, path):
                damage(path, "flip" if fault.action == "flip" else "truncate")

    def _due(self, name: str, actions: tuple[str, ...]) -> list[Fault]:
        """Faults whose turn at point ``name`` has come. Not only at exactly the ``nth`` passing: an error or a partition may
        have taken that one."""
        with self._lock:
            passed = self._passed[name]
            return [
                fault
                for fault in self._faults
                if fault.point == name
                and fault.nth <= passed
                and fault.action in actions
                and fault.name not in self._spent
            ]

    def _fire(self, fault: Fault, path: Path | None = None) -> bool:
        """Record durably that ``fault`` happens now; False when it has happened before, in whichever process."""
        with self._lock:
            if fault.name in self._spent:
                return False
            self._spent.add(fault.name)
        body = {
            "fault": fault.name,
            "process": self._process,
            "pid": os.getpid(),
            "at": utc_now(),
            "mono_s": round(time.monotonic(), 4),
        }
        if path is not None:
            body["path"] = str(path)
        record = fired_path(self._layout, fault.name)
        plain = Operations()  # these are not operations of the run: no fault hits them
        try:
            with plain.create(record) as stream:
                stream.write(json.dumps(body).encode())
                plain.sync_file(record, stream)
            plain.sync_directory(record.parent)
        except FileExistsError:
            return False
        print(f"fault {fault.name}: {fault.action} at {fault.point}", file=sys.stderr, flush=True)
        return True

    def _act(self, fault: Fault) -> None:
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "outlive":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
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


def damage(path: Path, action: Literal["flip", "truncate"]) -> None:
    """Flip a bit in the middle of a file, or cut it in half, as a failing disk would: behind everybody's back."""
    data = bytearray(path.read_bytes())
    if action == "truncate":
        del data[len(data) // 2 :]
    elif data:
        data[len(data) // 2] ^= 0x10
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
