"""One sum over both nodes: ``python -m milesbatch.doctor.collective RANK ADDRESS PORT KIND`` (``nccl`` or ``gloo``).

It proves that trainer ranks on two nodes can meet: the same rendezvous and the same libraries as the trainer's.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

_WITHIN = timedelta(seconds=30)
_ELEMENTS = 4 << 20


def sum_over_both(rank: int, address: str, port: int, kind: str) -> dict[str, Any]:
    """``seconds`` of one all-reduce of 16 MiB, and ``bytes_per_s``; or ``error``."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if kind == "nccl" else torch.device("cpu")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, 2, is_master=rank == 0, timeout=_WITHIN
    )
    dist.init_process_group(kind, store=store, rank=rank, world_size=2, timeout=_WITHIN)
    numbers = torch.full((_ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(numbers)  # the first one sets connections up
    began_s = time.perf_counter()
    dist.all_reduce(numbers)
    total = float(numbers[0])
    seconds = time.perf_counter() - began_s
    dist.destroy_process_group()
    if total != 6.0:  # (1 + 2) * 2
        return {"error": f"the sum is {total}, expected 6"}
    return {"seconds": seconds, "bytes_per_s": 4 * _ELEMENTS / seconds, "error": None}


def main(arguments: list[str]) -> int:
    rank, address, port, kind = arguments
    try:
        body = sum_over_both(int(rank), address, int(port), kind)
    except (ImportError, RuntimeError, OSError) as error:  # torch.distributed's own errors are RuntimeErrors
        body = {"error": str(error).splitlines()[0]}
    print(json.dumps(body), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
