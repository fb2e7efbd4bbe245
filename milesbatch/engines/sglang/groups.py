"""Weights from this process's memory into its servers: a process group with each of them, in which this process is rank
0.

    worker (rank 0) ── one group for each server ── its tensor-parallel ranks 1, 2, …
        begin_weight_update ──> buckets: announce over HTTP, broadcast over the group ──> end_weight_update

Owns these groups. Never: whence the copy comes; it is proven already, by broadcast from the trainer or from files.
Invariant: a server that fails costs its own group only, and a group in which anything failed is never used again.

Why the worker and not the trainer stands at rank 0: what enters a server has been compared with the committed manifest
first, a server that hangs cannot hold up the trainer or other workers, and a restarted one catches up without asking
anybody else.

The groups are of gloo, with GPUs too: NCCL takes no two ranks on one GPU, and the worker has none but those of its servers.
gloo broadcasts from this process's memory into a GPU (https://docs.pytorch.org/docs/stable/distributed.html, backends).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from milesbatch.engines.protocol import PolicyWeights
from milesbatch.engines.sglang.client import ServerClient
from milesbatch.errors import EngineError

_JOIN_S = 60.0


@dataclass(slots=True)
class ByGroup:
    """``update_weights_from_distributed`` (satisfies ``Way``)."""

    address: str
    """Under which servers reach this process."""
    bucket_bytes: int
    ranks: int = 1
    """Of one server: its tensor parallelism."""
    _groups: dict[str, tuple[str, Any, Any]] = field(default_factory=dict)
    """Address of a server -> name, process group and store of its group."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def load(
        self, client: ServerClient, weights: PolicyWeights, name: str, *, keep_cache: bool, limit_s: float
    ) -> None:
        try:
            group_name, group = await self._group_with(client, limit_s)
            await client.post("begin_weight_update", {}, limit_s)
            tensors = weights.tensors()
            for bucket in _buckets(tensors, self.bucket_bytes):
                await self._send(client, group_name, group, [(key, tensors[key]) for key in bucket], name, limit_s)
            await client.post("end_weight_update", {}, limit_s)
            if not keep_cache:
                await client.post("flush_cache", {}, limit_s)
        except BaseException:
            self.forget(client)
            raise

    def forget(self, client: ServerClient) -> None:
        self._groups.pop(client.url, None)

    async def _group_with(self, client: ServerClient, limit_s: float) -> tuple[str, Any]:
        found = self._groups.get(client.url)
        if found is not None:
            return found[0], found[1]
        name = f"milesbatch-{secrets.token_hex(4)}-{next(self._numbers)}"
        size = 1 + self.ranks
        timeout = timedelta(seconds=min(limit_s, _JOIN_S))
        with _named("a store for a server's weights cannot be opened"):
            store = dist.TCPStore(  # type: ignore[attr-defined]
                self.address, 0, is_master=True, timeout=timeout, wait_for_workers=False
            )
        body = {
            "master_address": self.address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": "gloo",
        }
        asked = asyncio.create_task(client.post("init_weights_update_group", body, min(limit_s, _JOIN_S)))
        try:
            group = await asyncio.to_thread(self._join, store, name, size, timeout)
        except EngineError:
            with suppress(EngineError):
                await asked  # its own words say more
            raise
        await asked
        self._groups[client.url] = name, group, store
        return name, group

    def _join(self, store: Any, name: str, size: int, timeout: timedelta) -> Any:
        """The same calls as SGLang's, so that both sides look for each other under the same keys."""
        prefixed = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        backend = dist.Backend("gloo")
        with _named("a server did not join the group for its weights"):
            label: Any = name
            group, _ = distributed_c10d._new_process_group_helper(
                size, 0, [], backend, prefixed, group_name=label, timeout=timeout
            )
            return group

    async def _send(
        self,
        client: ServerClient,
        group_name: str,
        group: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        name: str,
        limit_s: float,
    ) -> None:
        body = {
            "names": [key for key, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": name,
        }
        asked = asyncio.create_task(client.post("update_weights_from_distributed", body, limit_s))
        try:
            await asyncio.to_thread(self._broadcast, group, [tensor for _, tensor in tensors], limit_s)
        except BaseException:
            asked.cancel()
            raise
        await asked

    def _broadcast(self, group: Any, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=limit_s)
        flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        with _named("a bucket of weights was not sent"):
            group.broadcast([flat], options).wait(options.timeout)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns what torch.distributed raises into an error with a name."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        words = str(error).splitlines()
        raise EngineError(f"{what}: {words[0] if words else type(error).__name__}") from error


def _buckets(tensors: Any, most: int) -> list[list[str]]:
    """Names of whole tensors, in order, of at most ``most`` bytes together, or a single larger one; one dtype each."""
    found: list[list[str]] = []
    size, dtype = most + 1, None
    for name, tensor in tensors.items():
        if size + tensor.nbytes > most or tensor.dtype != dtype:
            found.append([])
            size, dtype = 0, tensor.dtype
        found[-1].append(name)
        size += tensor.nbytes
    return found
