"""What torch sees of this host's GPUs, as one JSON document: ``python -m milesbatch.doctor.gpus``.

Each device computes something small, because a device that is listed and cannot compute is the usual way in which a node is
broken.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def look_at_gpus() -> dict[str, Any]:
    """``torch`` (version or null), ``cuda``, ``nccl``, ``devices`` with ``name``, ``memory_bytes`` and ``error``."""
    try:
        import torch
    except ImportError as error:
        return {"torch": None, "error": str(error)}
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": None, "devices": []}
    if not torch.cuda.is_available():
        return found
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = {"name": properties.name, "memory_bytes": properties.total_memory, "error": None}
        try:
            ones = torch.ones(256, 256, device=f"cuda:{index}")
            total = float((ones @ ones).sum())
            if total != 256.0**3:
                device["error"] = f"a product of ones is {total}"
        except RuntimeError as error:
            device["error"] = str(error).splitlines()[0]
        found["devices"].append(device)
    return found


if __name__ == "__main__":
    print(json.dumps(look_at_gpus()))
    sys.exit(0)
