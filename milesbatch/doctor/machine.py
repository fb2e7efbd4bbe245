"""This host: memory, open files, shared memory, GPUs. Reads ``/proc`` and asks torch in a process of its own.

Invariant: changes nothing, and imports no torch here.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from milesbatch.doctor.child import ChildAnswer, run_probe
from milesbatch.doctor.verdict import Check, bad, ok, unchecked, warn

_AREA = "machine"
_GIB = 1 << 30
_LEAST_FILES = 1024
_LEAST_SHARED_BYTES = _GIB
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARED_MEMORY = Path("/dev/shm")


def machine_checks() -> list[Check]:
    """All that this host alone tells."""
    return [memory_check(), files_check(), shared_memory_check(), *gpu_checks(run_probe("gpus"))]


def memory_check(meminfo: Path = MEMINFO, limit: Path = CGROUP_LIMIT) -> Check:
    """Memory that processes here may use: the machine's, or less where a control group says so."""
    total, available = _meminfo(meminfo)
    if total is None:
        return unchecked(_AREA, "memory", f"{meminfo} cannot be read")
    try:
        allowed = int(limit.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        allowed = total
    found = f"{total / _GIB:.1f} GiB" + (f", {available / _GIB:.1f} available" if available is not None else "")
    if allowed < total:
        found += f"; processes here are limited to {allowed / _GIB:.1f} GiB"
    if min(total, allowed) < 2 * _GIB:
        return warn(
            _AREA, "memory", found, "a trainer and a worker with a small model need about 2 GiB", "use a larger host"
        )
    return ok(_AREA, "memory", f"{found}; {len(os.sched_getaffinity(0))} CPUs may be used")


def files_check() -> Check:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _LEAST_FILES:
        meaning = "a controller with many workers keeps a connection open for each"
        return warn(
            _AREA, "open files", f"{soft} (may be raised to {hard})", meaning, f"ulimit -n {_LEAST_FILES} or more"
        )
    return ok(_AREA, "open files", f"{soft} a process")


def shared_memory_check(place: Path = SHARED_MEMORY) -> Check:
    """Room in shared memory, which NCCL and torch use between processes of one host."""
    try:
        status = os.statvfs(place)
    except OSError as error:
        return unchecked(_AREA, "shared memory", f"{place}: {error.strerror}")
    free = status.f_bavail * status.f_frsize
    if free < _LEAST_SHARED_BYTES:
        meaning = "NCCL between GPUs of one host fails without it; a run on CPUs does not need it"
        mend = "containers start with 64 MiB: give them more (--shm-size, or mount /dev/shm)"
        return warn(_AREA, "shared memory", f"{free / (1 << 20):.0f} MiB free in {place}", meaning, mend)
    return ok(_AREA, "shared memory", f"{free / _GIB:.1f} GiB free in {place}")


def gpu_checks(answer: ChildAnswer) -> list[Check]:
    """Verdict on what the probe in :mod:`milesbatch.doctor.gpus` said."""
    if answer.body is None:
        meaning = "a driver that hangs or crashes stops every role on this host"
        return [
            bad(
                _AREA, "GPUs", f"asking torch failed: {answer.error}", meaning, "try `nvidia-smi`; see the driver's log"
            )
        ]
    body = answer.body
    if body.get("torch") is None:
        found = f"torch cannot be imported ({body.get('error')})"
        return [
            warn(
                _AREA,
                "GPUs",
                found,
                "enough for a login node; not for compute nodes",
                "pip install 'milesbatch[train]'",
            )
        ]
    if not body["devices"]:
        return [ok(_AREA, "GPUs", f"none that torch {body['torch']} can use; runs compute on CPUs here")]
    return [_device_check(index, device, body) for index, device in enumerate(body["devices"])]


def _device_check(index: int, device: dict[str, Any], body: dict[str, Any]) -> Check:
    name = f"GPU {index}"
    found = f"{device['name']}, {device['memory_bytes'] / _GIB:.0f} GiB, CUDA {body['cuda']}, NCCL {body['nccl']}"
    if device["error"]:
        meaning = "it is listed, and cannot compute"
        return bad(
            _AREA, name, f"{found}: {device['error']}", meaning, "drain the node; see the driver's log (dmesg: Xid)"
        )
    return ok(_AREA, name, found)


def _meminfo(path: Path) -> tuple[int | None, int | None]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None, None
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return sizes.get("MemTotal"), sizes.get("MemAvailable")
