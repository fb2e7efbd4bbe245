"""The SGLang engine that a recipe asks for, for one worker: which servers, where they keep weights, how weights get
there.

Owns how recipe, run and worker become an engine and its follower. Never: requests or servers themselves. Invariant: the
two fit together: an engine that loads directories has a follower that stages them, one that is sent tensors has one
that holds them.

    weights.transport: delta              files ──> staged directory on this host ──> update_weights_from_disk
    weights.transport: broadcast, both    the proven copy ──> a group with each server ──> update_weights_from_distributed
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milesbatch.cluster.context import RoleContext
from milesbatch.engines.sglang.engine import EngineLimits, SGLangEngine
from milesbatch.engines.sglang.fleet import FleetOptions
from milesbatch.engines.sglang.groups import ByGroup
from milesbatch.engines.sglang.serving import AttachedServer, ServerPlace, StartedServer
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.engines.sglang.weights import FromDisk, Prover, Way
from milesbatch.errors import StorageError
from milesbatch.models.load import context_length, load_config
from milesbatch.rollout.reaching import open_follower, open_staged_follower
from milesbatch.rollout.staged import StagedFollower
from milesbatch.store.durable import make_directory, remove_tree
from milesbatch.store.run import OpenRun
from milesbatch.weights.follower import Follower


@dataclass(frozen=True, slots=True)
class Servers:
    """One worker's engine, and the follower that belongs to it."""

    engine: SGLangEngine
    follower: Follower | StagedFollower
    memory: Path

    def close(self) -> None:
        """End the servers, and free the memory."""
        self.engine.close()
        if isinstance(self.follower, StagedFollower):
            self.follower.close()
        remove_tree(self.memory)


def open_servers(
    run: OpenRun, context: RoleContext, tokenizer: Any, tell: Callable[[str], None], sign: Callable[[], None]
) -> Servers:
    """Start this worker's servers, or attach to its own of ``rollout.sglang.urls``; returns when one of them is up.

    ``tell`` hears what happens to servers, ``sign`` that one of them lives.

    Raises:
        InputError: SGLang's environment is not there.
        EngineError: no server comes up; says why, in the words of its log.
        StorageError: the directory for weights cannot be used.
    """
    recipe, section = run.recipe, run.recipe.rollout.sglang
    torch.set_num_threads(recipe.rollout.threads)
    memory = memory_of(run, context)
    places = [*_places(run, context, memory)]
    can_expect = section.device == "cpu" and section.tensor_parallel == 1
    options = FleetOptions(
        pause=section.pause,
        start_timeout_s=section.start_timeout_s,
        health_timeout_s=section.health_timeout_s,
        request_timeout_s=section.request_timeout_s,
        tell=tell,
        sign=sign,
    )
    follower: Follower | StagedFollower
    way: Way
    if recipe.weights.transport == "delta":
        follower = open_staged_follower(run, context.incarnation, tell, memory / "staged")
        way = FromDisk(follower.held)
    else:
        follower = open_follower(run, context.incarnation, tell)
        way = ByGroup(context.address, recipe.weights.broadcast_bucket_bytes, section.tensor_parallel, section.device)
    model = run.layout.model
    limits = EngineLimits(context_length(model), int(load_config(model).vocab_size))
    engine = SGLangEngine(
        places,
        way,
        Prover(can_expect),
        options,
        limits,
        stop_text=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
    )
    servers = Servers(engine, follower, memory)
    try:
        engine.await_server()
    except BaseException:
        servers.close()
        raise
    return servers


def memory_of(run: OpenRun, context: RoleContext) -> Path:
    """This start's own directory for weights; made, and nobody else's.

    Raises:
        StorageError: it cannot be made.
    """
    section = run.recipe.rollout.sglang
    base = Path(section.memory_dir) if section.memory_dir else Path("/dev/shm")
    if not section.memory_dir and not base.is_dir():
        base = Path(tempfile.gettempdir())
    life = "" if section.urls else f".i{context.incarnation}.{context.attempt}"
    directory = base / f"milesbatch-{os.getuid()}" / f"{run.record.run_id}.{context.name}{life}"
    make_directory(directory)
    try:
        directory.parent.chmod(0o700)
    except OSError as error:
        raise StorageError(
            f"{directory.parent} belongs to somebody else: {error}", mend="choose another rollout.sglang.memory_dir"
        ) from error
    return directory


def _places(run: OpenRun, context: RoleContext, memory: Path) -> list[ServerPlace]:
    rollout, section = run.recipe.rollout, run.recipe.rollout.sglang
    if section.urls:
        return [AttachedServer(url) for url in section.urls[context.index :: context.count]]
    log = run.layout.log(context.name, context.incarnation)
    model = run.layout.model.absolute()
    return [
        StartedServer(
            name=f"{context.name}.server-{number}",
            settings=ServerSettings(
                python=Path(section.python).absolute(),
                model=model,
                device=section.device,
                dtype=run.recipe.weights.dtype,
                max_length=context_length(model),
                max_running=-(-rollout.max_concurrent_samples // section.servers),
                tensor_parallel=section.tensor_parallel,
                first_device=number * section.tensor_parallel,
                memory_fraction=section.memory_fraction,
                max_total_tokens=section.max_total_tokens,
                seed=run.recipe.seed + context.index * section.servers + number,
                arguments=section.arguments,
            ),
            log=log.with_name(f"{context.name}.server-{number}{log.name.removeprefix(context.name)}"),
            memory=memory,
            threads=rollout.threads,
        )
        for number in range(section.servers)
    ]
