"""Sets one trainer rank up: meets the other ranks, builds the backend, and hands over to the loop."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from milesbatch.cluster.context import RoleContext
from milesbatch.decisions.origin import origin_of
from milesbatch.errors import RunMismatchError
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run
from milesbatch.store.sight import first_sight
from milesbatch.wire.client import Controller, Pulse

_JOBS_S = 1800.0
"""A rank's encoding and writing of one version takes less, but for a full disk."""
_NEVER = timedelta(days=7)
"""Collectives never time out by themselves: rank 0 may wait long for rollouts. Hangs are found by heartbeats."""


def main(context: RoleContext) -> None:
    """Run one rank until the run is finished or the controller says stop."""
    pulse = Pulse(context)
    pulse.start()  # before torch is imported, see rollout.worker
    began_s = time.monotonic()

    import torch
    import torch.distributed as dist

    from milesbatch.backends.distributed_checkpoint import AsyncSaver
    from milesbatch.backends.fsdp import FsdpBackend
    from milesbatch.models.load import load_initial_model
    from milesbatch.trainer.checkpointing import Checkpointer
    from milesbatch.trainer.loop import TrainerLoop
    from milesbatch.trainer.overlap import InBackground, RankTeam
    from milesbatch.trainer.placing import group_backend, rank_device

    layout = RunLayout(context.run_directory)
    run = open_run(layout, context.incarnation, first_sight(layout.root))
    recipe = run.recipe
    torch.set_num_threads(recipe.trainer.threads)
    torch.use_deterministic_algorithms(recipe.determinism == "bitwise", warn_only=True)
    controller = Controller(context)
    device = rank_device(recipe, context.index)
    _join(context, controller, dist, group_backend(device))
    events = EventLog(layout, context.name, context.incarnation)
    try:
        _check_model(run)
        backend = FsdpBackend(recipe, load_initial_model(recipe, layout.model), device)
        team = RankTeam(_JOBS_S + recipe.slurm.disk_full_wait_s)
        loop = TrainerLoop(context, run, backend, controller, pulse, events, team, InBackground())
        checkpointer = Checkpointer(
            layout,
            loop.fence,
            AsyncSaver(),
            context.index,
            context.count,
            recipe.checkpoint.keep,
            loop.patience,
            recipe.checkpoint.keep_every,
            origin_of(run.record).step,
        )
        events.write("ready", seconds=round(time.monotonic() - began_s, 2))
        loop.run(checkpointer)
    finally:
        events.close()
    dist.destroy_process_group()


def _join(context: RoleContext, controller: Controller, dist: Any, backend: str) -> None:
    """All ranks of this attempt join one process group; rank 0's store listens on a port that the kernel chose."""
    if context.index == 0:
        store = dist.TCPStore(context.address, 0, context.count, is_master=True, timeout=_NEVER, wait_for_workers=False)
        controller.meet(f"{context.address}:{store.port}")
    else:
        host, _, port = controller.meet(None).rpartition(":")
        store = dist.TCPStore(host, int(port), context.count, is_master=False, timeout=_NEVER)
    dist.init_process_group(backend, store=store, rank=context.index, world_size=context.count, timeout=_NEVER)


def _check_model(run: OpenRun) -> None:
    """The starting weights must be those that the run began with, also after a restart.

    Raises:
        RunMismatchError: they have changed; names both digests.
    """
    from milesbatch.models.fingerprint import model_fingerprints

    for name, digest in model_fingerprints(run.recipe, run.layout.model).items():
        if run.record.fingerprints[name] != digest:
            raise RunMismatchError(
                f"the {name} of run {run.record.run_id} has changed since the run began:"
                f" it was {run.record.fingerprints[name]}, it is {digest}",
                mend="put back what the run was started with, or start a new run with --run-dir",
            )
