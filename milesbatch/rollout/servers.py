"""The SGLang engine that a recipe asks for, for a worker or an evaluator: which servers, where they keep weights, how weights
get there.

Owns how recipe, run and owner become an engine and its follower. Never: requests or servers themselves. Invariant: the
two fit together: an engine that loads directories has a follower that stages them, one that is sent tensors has one
that holds them.

    weights.transport: delta              files ──> staged directory on this host ──> update_weights_from_disk
                       broadcast, both    the proven copy ──> a group with each server ──> update_weights_from_distributed
    experts, any transport                the same: versions have a layer's experts in one tensor, servers know each by itself
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milesbatch.cluster.context import RoleContext
from milesbatch.engines.sglang.engine import EngineLimits, SGLangEngine
from milesbatch.engines.sglang.fitness import Needed
from milesbatch.engines.sglang.fleet import FleetOptions
from milesbatch.engines.sglang.groups import ByGroup
from milesbatch.engines.sglang.key import key_of
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.engines.sglang.router import Router
from milesbatch.engines.sglang.serving import AttachedServer, ServerPlace, StartedServer
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.engines.sglang.weights import FromDisk, Prover, Way
from milesbatch.models.experts import FileNames, recorded_shape
from milesbatch.models.load import context_length, load_config, load_skeleton
from milesbatch.recipe.models import SGLang
from milesbatch.recipe.sglang import python_of_servers
from milesbatch.rollout.memory import LocalMemory, Room
from milesbatch.rollout.reaching import open_follower, open_staged_follower
from milesbatch.rollout.staged import StagedFollower
from milesbatch.store.patience import Patience
from milesbatch.store.run import OpenRun
from milesbatch.weights.follower import Follower


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose servers they are."""

    name: str
    """Part of the names of servers, logs and the directory for weights."""
    incarnation: int
    life: str
    """Tells this start from others of the same name; empty where servers outlive it."""
    address: str
    """Under which the servers reach it."""
    number: int
    """Of its first server, among those of all owners."""
    servers: int
    """How many it starts, where it does not attach."""
    urls: tuple[str, ...]
    """Running servers that it attaches to; empty: it starts its own."""
    router: str | None = None
    """In front of ``urls``."""

    @classmethod
    def worker(cls, context: RoleContext, section: SGLang) -> Owner:
        """A rollout worker: its own share of ``rollout.sglang.urls``, or as many servers as the recipe says."""
        return cls(
            name=context.name,
            incarnation=context.incarnation,
            life="" if section.urls else f".i{context.incarnation}.{context.attempt}",
            address=context.address,
            number=context.index * section.servers,
            servers=section.servers,
            urls=section.urls[context.index :: context.count],
            router=dict(enumerate(section.routers)).get(context.index),
        )

    @classmethod
    def evaluator(cls, name: str, incarnation: int, life: str, urls: tuple[str, ...] = ()) -> Owner:
        """An evaluator: one server of its own, or running ones that nobody else uses; the workers' follow the workers."""
        address = socket.gethostname() if urls else "127.0.0.1"
        return cls(name, incarnation, life, address, number=0, servers=1, urls=urls)


class Servers:
    """One owner's servers: the follower of their weights at once, the engine when it is asked for."""

    def __init__(self, run: OpenRun, owner: Owner, listener: FleetListener) -> None:
        """Raises:
        InputError: the directory for weights is none, or has no room for the model.
        StorageError: it cannot be used.
        """
        self._run, self._owner, self._listener = run, owner, listener
        section, weights = run.recipe.rollout.sglang, run.recipe.weights
        self._names = FileNames.of_model(run.layout.model)
        self._engine: SGLangEngine | None = None
        self._way: Way
        self.follower: Follower | StagedFollower
        is_staged = weights.transport == "delta" and not self._names.differ
        room = Room(Patience(run.recipe.slurm.disk_full_wait_s, listener.room or listener.tell))
        needed = copy_bytes(run.layout.model, weights.dtype) if is_staged else 0
        self._memory = memory_of(run, owner, room, needed)
        if is_staged:
            staged = self._memory.directory / "staged"
            try:
                self.follower = open_staged_follower(run, owner.incarnation, listener.tell, staged, room)
            except BaseException:
                self._memory.close()
                raise
            self._way = FromDisk(self.follower.held)
        else:
            self.follower = open_follower(run, owner.incarnation, listener.tell)
            self._way = ByGroup(owner.address, weights.broadcast_bucket_bytes, section.tensor_parallel)

    def open_engine(self, tokenizer: Any) -> SGLangEngine:
        """Start the servers, or attach to them; returns when one of them is up.

        Raises:
            InputError: SGLang's environment is not there.
            EngineError: no server comes up; says why, in the words of its log.
        """
        section = self._run.recipe.rollout.sglang
        torch.set_num_threads(self._run.recipe.rollout.threads)
        model = self._run.layout.model
        self._engine = SGLangEngine(
            self._places(),
            self._way,
            Prover(can_expect=section.device == "cpu" and section.tensor_parallel == 1),
            FleetOptions(
                pause=section.pause,
                start_timeout_s=section.start_timeout_s,
                health_timeout_s=section.health_timeout_s,
                request_timeout_s=section.request_timeout_s,
                update_timeout_s=section.update_timeout_s,
                listener=self._listener,
                needed=Needed.of_model(
                    model, self._run.recipe.weights.dtype, context_length(model), routed_experts=section.routed_experts
                ),
            ),
            EngineLimits(
                context_length(model), int(load_config(model).vocab_size), recorded_shape(self._run.recipe, model)
            ),
            stop_text=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
            in_files=self._names.of if self._names.differ else None,
            router=None if self._owner.router is None else Router(self._owner.router, key_of(section)),
        )
        self._engine.await_server()
        return self._engine

    def close(self) -> None:
        """End the servers, and free the memory."""
        if self._engine is not None:
            self._engine.close()
        if isinstance(self.follower, StagedFollower):
            self.follower.close()
        self._memory.close()

    def _places(self) -> list[ServerPlace]:
        owner, rollout, section = self._owner, self._run.recipe.rollout, self._run.recipe.rollout.sglang
        if owner.urls:
            key = key_of(section)
            return [AttachedServer(url, key) for url in owner.urls]
        log = self._run.layout.log(owner.name, owner.incarnation)
        model = self._run.layout.model.absolute()
        return [
            StartedServer(
                name=f"{owner.name}.server-{number}",
                settings=ServerSettings(
                    python=python_of_servers(section.python),
                    model=model,
                    device=section.device,
                    dtype=self._run.recipe.weights.dtype,
                    max_length=context_length(model),
                    max_running=-(-rollout.max_concurrent_samples // owner.servers),
                    tensor_parallel=section.tensor_parallel,
                    first_device=number * section.tensor_parallel,
                    memory_fraction=section.memory_fraction,
                    max_total_tokens=section.max_total_tokens,
                    routed_experts=section.routed_experts,
                    seed=self._run.recipe.seed + owner.number + number,
                    arguments=section.arguments,
                ),
                log=log.with_name(f"{owner.name}.server-{number}{log.name.removeprefix(owner.name)}"),
                memory=self._memory.directory,
                threads=rollout.threads,
            )
            for number in range(owner.servers)
        ]


def memory_of(run: OpenRun, owner: Owner, room: Room, needed: int) -> LocalMemory:
    """This start's own directory for weights; made, nobody else's, and with room for ``needed`` bytes. Those that dead
    processes of the run left are gone.

    Raises:
        InputError: ``rollout.sglang.memory_dir`` is no directory, or its filesystem is too small.
        LocalSpaceError: others have taken the space, and did not give it back in time.
        StorageError: it cannot be made.
    """
    section = run.recipe.rollout.sglang
    base = Path(section.memory_dir) if section.memory_dir else Path("/dev/shm")
    if not section.memory_dir and not base.is_dir():
        base = Path(tempfile.gettempdir())
    base /= f"milesbatch-{os.getuid()}"
    memory = room.until_there(lambda: LocalMemory.take(base, run.record.run_id, owner.name, owner.life))
    try:
        room.until_there(lambda: memory.require_room(needed))
    except BaseException:
        memory.close()
        raise
    return memory


def copy_bytes(model: Path, dtype: str) -> int:
    """Bytes of a version of the model in ``model``, which may be without weights, in the dtype of versions.

    Raises:
        ModelError: the configuration cannot be read.
    """
    with torch.device("meta"):
        skeleton = load_skeleton(model, getattr(torch, dtype))
    tensors = {id(tensor): tensor for tensor in skeleton.state_dict(keep_vars=True).values()}  # tied ones once
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
