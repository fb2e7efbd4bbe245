"""How long training stands still for a checkpoint in the background, against a synchronous save of the same state.

Run: ``python benchmarks/checkpoint_stall.py [--layers 8] [--rounds 5] [--directory DIR]``

Two ranks (FSDP2, gloo, one thread each) hold a made model with its AdamW moments. Each round measures both sides, in turns
which comes first:

* synchronous: ``torch.distributed.checkpoint.save`` of the state, each rank's file fsynced; training could go on after it;
* in the background: what the trainer's loop waits for when it begins a checkpoint (:meth:`Checkpointer.start` and what goes
  before it), before the next update when the copy is not finished (:meth:`Checkpointer.await_copy`), and when it commits it
  (:meth:`Checkpointer.finish`, once everything is written); each time the slowest rank counts.

Apart from that stall, train steps that overlap the copying and writing are slower, since all want the same cores: the extra
time of those steps, against steps of the same round without a save, is printed too, and is no part of the ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import Qwen3Config, Qwen3ForCausalLM

from milesbatch.algorithm.samples import TrainSample
from milesbatch.backends.distributed_checkpoint import AsyncSaver
from milesbatch.backends.fsdp import FsdpBackend
from milesbatch.recipe.models import Recipe
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import AT_ONCE
from milesbatch.trainer.checkpointing import Checkpointer, CheckpointFacts

RANKS = 2
LIMIT = 0.10
VOCABULARY = 8192
Round = dict[str, float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the model (default 512)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds, after one to warm up (default 5)")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written (default: a temporary directory)")
    return parser.parse_args()


def make_backend(arguments: argparse.Namespace) -> FsdpBackend:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=arguments.hidden_size // 8,
        tie_word_embeddings=False,
    )
    recipe = Recipe.model_validate(
        {"name": "stall", "steps": 1000, "model": {"kind": "made"}, "data": {"kind": "arithmetic"}}
    )
    return FsdpBackend(recipe, Qwen3ForCausalLM(config), torch.device("cpu"))


def make_samples() -> list[TrainSample]:
    draw = random.Random(0)
    return [
        TrainSample(
            group_id=0,
            sample_index=index,
            tokens=tuple(draw.randrange(VOCABULARY) for _ in range(24)),
            loss_mask=(False,) * 8 + (True,) * 16,
            rollout_logprobs=(0.0,) * 8 + (-9.0,) * 16,
            advantage=draw.uniform(-1.0, 1.0),
            temperature=1.0,
        )
        for index in range(2 * RANKS)
    ]


class Rank:
    """One rank at work; all times are those of the slowest rank."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._layout = RunLayout(directory / "run")
        self._plain = directory / "synchronous"
        self._is_first = dist.get_rank() == 0
        if self._is_first:
            for path in self._layout.directories():
                path.mkdir(parents=True)
        self._backend = make_backend(arguments)
        self._samples = make_samples()
        self._checkpointer = Checkpointer(
            self._layout, Fence(self._layout, 1), AsyncSaver(), dist.get_rank(), RANKS, 2, AT_ONCE
        )
        self._step = 0
        self._waited_s = 0.0

    @property
    def state_bytes(self) -> int:
        """Of all ranks together."""
        tensors = [value for value in self._backend.state_dict().values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def round(self, *, synchronous_first: bool) -> Round:
        alone_s = statistics.median(self._train_step() for _ in range(3))
        if synchronous_first:
            return {**self._synchronous(), **self._background(alone_s)}
        return {**self._background(alone_s), **self._synchronous()}

    def _synchronous(self) -> Round:
        shutil.rmtree(self._plain, ignore_errors=True)
        writer = FileSystemWriter(self._plain, single_file_per_rank=True, sync_files=True, overwrite=True)
        began_s = self._together()
        save(self._backend.state_dict(), storage_writer=writer)
        return {"synchronous": self._slowest(began_s)}

    def _background(self, alone_s: float) -> Round:
        """Begin, train while it is written, commit: as :class:`milesbatch.trainer.loop.TrainerLoop` does."""
        self._train_step()  # so that what was written before is not being written back any more
        began_s = self._together()
        if self._is_first:
            self._checkpointer.prepare(self._step)
        dist.barrier()
        facts = CheckpointFacts(self._step, "", 0, 0, {}, (), ())
        self._checkpointer.start(self._backend.state_dict(), facts)
        start_s = self._slowest(began_s)
        self._waited_s = 0.0
        steps = [self._train_step()]
        waited_s = self._max(self._waited_s)
        while not self._agree(self._checkpointer.is_written):
            steps.append(self._train_step())
        began_s = self._together()
        self._checkpointer.finish()
        commit_s = self._slowest(began_s)
        slower_s = sum(steps) - len(steps) * alone_s - waited_s
        return {"start": start_s, "copy": waited_s, "commit": commit_s, "steps": len(steps), "slower": slower_s}

    def _train_step(self) -> float:
        self._step += 1
        began_s = self._together()
        self._backend.train_step(self._step, self._samples, self._await_copy)
        return self._slowest(began_s)

    def _await_copy(self) -> None:
        began_s = time.perf_counter()
        self._checkpointer.await_copy()
        self._waited_s += time.perf_counter() - began_s

    def _together(self) -> float:
        dist.barrier()
        return time.perf_counter()

    def _slowest(self, began_s: float) -> float:
        return self._max(time.perf_counter() - began_s)

    def _max(self, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def _agree(self, value: bool) -> bool:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def work(index: int, arguments: argparse.Namespace, directory: Path, results: Any) -> None:
    """What each rank's process does; rank 0 prints, and sends the ratio."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=index, world_size=RANKS)
    rank = Rank(arguments, directory)
    rounds = [rank.round(synchronous_first=bool(number % 2)) for number in range(arguments.rounds + 1)]
    dist.barrier()
    if index == 0:
        results.put(report(rounds[0], rounds[1:], rank.state_bytes))
    dist.barrier()
    dist.destroy_process_group()


def stall_of(found: Round) -> float:
    return found["start"] + found["copy"] + found["commit"]


def report(first: Round, rounds: list[Round], state_bytes: int) -> float:
    """Print the figures; returns the ratio of the stalls."""
    median = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    ratios = [stall_of(found) / found["synchronous"] for found in rounds]
    ratio = statistics.median(ratios)
    print(f"state {state_bytes / 1e6:.0f} MB over {RANKS} ranks, {len(rounds)} rounds, medians in seconds")
    print(f"synchronous save              {median['synchronous']:8.3f}")
    print(
        f"in the background, stall      {statistics.median(map(stall_of, rounds)):8.3f}   (the first: {stall_of(first):.3f})"
    )
    print(f"  to begin                    {median['start']:8.3f}")
    print(f"  for the copy                {median['copy']:8.3f}")
    print(f"  to commit                   {median['commit']:8.3f}")
    print(f"steps that overlap, slower by {median['slower']:8.3f}   ({median['steps']:.0f} steps; work, not a stall)")
    print(f"ratio of the stalls           {ratio:8.3f}   rounds {[round(value, 3) for value in ratios]}, limit {LIMIT}")
    return ratio


def main() -> int:
    arguments = parse_arguments()
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-stall-", dir=arguments.directory))
    try:
        processes = multiprocessing.get_context("spawn")
        results = processes.SimpleQueue()
        ranks = [
            processes.Process(target=work, args=(index, arguments, directory, results), daemon=True)
            for index in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            return 1
        return 0 if results.get() < LIMIT else 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
