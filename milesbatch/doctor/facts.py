"""What a compute node says of itself: name, addresses, packages, memory, GPUs. Reads only."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from milesbatch.cluster import slurm
from milesbatch.cluster.context import job_context
from milesbatch.doctor.child import run_probe
from milesbatch.doctor.machine import memory_check
from milesbatch.doctor.packages import installed_versions
from milesbatch.errors import SlurmError

_GPU_S = 60.0


def node_facts() -> dict[str, Any]:
    """A JSON document; the GPUs are asked for in a process of their own, because importing torch takes seconds."""
    answer = run_probe("gpus", timeout_s=_GPU_S)
    return {
        "node": node_name(),
        "host": socket.gethostname(),
        "memory": memory_check().found,
        "versions": installed_versions(),
        "gpus": answer.body if answer.body is not None else {"torch": None, "error": answer.error, "devices": []},
    }


def node_name() -> str:
    """As Slurm calls it, else the host's own name."""
    job = job_context()
    return (job.node if job is not None else "") or socket.gethostname()


def own_addresses() -> list[str]:
    """Under which others may reach this node; first the one that runs use (Slurm's NodeAddr)."""
    found: list[str] = []
    with contextlib.suppress(SlurmError):
        found.append(slurm.node(node_name()).address)
    found.append(socket.gethostname())
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(address for address in found if address))
