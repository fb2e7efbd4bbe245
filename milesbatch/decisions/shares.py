"""Which trainer rank encodes and writes which tensors of a policy version. Pure.

Invariant: every rank computes the same from the same sizes; each tensor is whole in one share. So what a version is, its digest
included, does not depend on how many shares it was written in.
"""

from __future__ import annotations

from collections.abc import Mapping


def shares(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Tensor name -> rank: largest first, each to the rank with the fewest bytes so far (of these the lowest).

    The largest share is at most a third larger than the best one possible, or just the largest tensor.

    Raises:
        ValueError: no rank.
    """
    if ranks < 1:
        raise ValueError(f"shares for {ranks} ranks; allowed: at least 1")
    loads = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        owners[name] = rank
        loads[rank] += sizes[name]
    return owners
