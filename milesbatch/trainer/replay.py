"""Replaying recorded steps from the files alone: ``python -m milesbatch.trainer.replay``, one process for each rank.

Reads only: nothing in the run changes, and no controller is needed. Rank 0 prints one JSON line for each step: the loss and the
weights digest, as they come out now.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from milesbatch.backends.distributed_checkpoint import load
from milesbatch.backends.fsdp import FsdpBackend
from milesbatch.errors import InputError, MilesbatchError
from milesbatch.models.load import load_initial_model
from milesbatch.recipe.models import Recipe
from milesbatch.records import BatchRecord
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trainer.batch import read_groups, step_data
from milesbatch.trainer.checkpointing import is_random, read_checkpoint
from milesbatch.trainer.placing import group_backend, rank_device
from milesbatch.weights.publisher import Publisher


def replay(layout: RunLayout, step: int, rank: int, world_size: int) -> None:
    """Replay up to ``step`` from the newest checkpoint below it (or the starting model).

    Raises:
        InputError: the step is not recorded. CorruptArtefactError: a file that it needs is damaged.
    """
    found = survey(layout, read_incarnations(layout))
    begin = found.origin.step
    if not begin < step <= found.last_batch:
        raise InputError(
            f"step {step} of {layout.root} is not recorded", mend=f"give a step from {begin + 1} to {found.last_batch}"
        )
    run = open_run(layout, len(read_incarnations(layout)))
    torch.set_num_threads(run.recipe.trainer.threads)
    torch.use_deterministic_algorithms(run.recipe.determinism == "bitwise", warn_only=True)
    backend = FsdpBackend(run.recipe, load_initial_model(run.recipe, layout.model), rank_device(run.recipe, rank))
    start = max((c for c in found.checkpoints if c < step), default=0)
    if start < begin:
        raise InputError(
            f"checkpoint {begin}, with which this fork began, does not count", mend="run `milesbatch audit` on the run"
        )
    if start:
        manifest = read_checkpoint(layout, start)
        if manifest.world_size != world_size and start != begin:
            raise InputError(f"checkpoint {start} was written by {manifest.world_size} ranks")
        state = backend.state_dict()
        saved = {key: value for key, value in state.items() if rank < manifest.world_size or not is_random(key)}
        load(saved, layout.checkpoint_shards(start, manifest.incarnation))
        backend.load_state_dict(state)
    publisher = Publisher(layout, len(read_incarnations(layout)), keyframe_every=1, before_commit=lambda: None)
    for record in found.batches[start - begin : step - begin]:
        figures = _step(run.recipe, layout, backend, record)
        named = backend.named_weights(getattr(torch, run.recipe.weights.dtype))
        if rank == 0:
            figures["weights_digest"] = publisher.digest_only(named, backend.tied_names())
            print(json.dumps(figures), flush=True)
        else:
            for _ in named:
                pass


def _step(recipe: Recipe, layout: RunLayout, backend: FsdpBackend, record: BatchRecord) -> dict[str, object]:
    temperature = recipe.rollout.sampling.temperature
    data = step_data(record, read_groups(layout, record.trained), recipe.algorithm, temperature)
    metrics = backend.train_step(record.step, data.samples)
    return {"step": record.step, "loss": metrics.loss, "reward_mean": data.metrics["reward_mean"]}


def main(arguments: list[str]) -> int:
    """``RUN STEP RANK WORLD_SIZE STORE``; errors on stderr."""
    run, step, rank, world_size, store = arguments
    try:
        kind = "cuda" if torch.cuda.is_available() else "cpu"  # more than the recipe may want costs nothing
        dist.init_process_group(
            group_backend(torch.device(kind)),
            store=dist.FileStore(store, int(world_size)),  # type: ignore[attr-defined]
            rank=int(rank),
            world_size=int(world_size),
        )
        replay(RunLayout(Path(run)), int(step), int(rank), int(world_size))
        dist.barrier()
    except MilesbatchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
