"""One rank of a small trainer group, started by test_fsdp.py: ``python fsdp_ranks.py PART RANK RANKS DIRECTORY``.

It does the work and writes down what it saw; the assertions are in the test.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from milesbatch.algorithm.samples import TrainSample
from milesbatch.backends.distributed_checkpoint import AsyncSaver, load
from milesbatch.backends.fsdp import FsdpBackend
from milesbatch.decisions.shares import shares
from milesbatch.errors import MilesbatchError
from milesbatch.recipe.models import Recipe

VOCABULARY = 32
STEPS = 4
CPU = torch.device("cpu")


def tiny_model(*, tied: bool = True, **options: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **options,
    )
    return Qwen3ForCausalLM(config)


def tiny_recipe(**trainer: Any) -> Recipe:
    # A large epsilon makes Adam's update nearly linear in the gradient, so that weights can be compared closely.
    optimizer = {"learning_rate": 0.02, "epsilon": 1e-3, "weight_decay": 0.1, "grad_clip": 0.5, "schedule": "cosine"}
    return Recipe.model_validate(
        {
            "name": "tiny",
            "steps": STEPS,
            "model": {"kind": "made"},
            "data": {"kind": "arithmetic"},
            "trainer": {"optimizer": optimizer, "max_tokens_per_microbatch": 48, **trainer},
            "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01},
        }
    )


def step_samples(step: int) -> list[TrainSample]:
    """Seven samples of very unequal length; those of step 2 hold one above the token budget and one without loss tokens."""
    if step == 3:
        return []
    draw = random.Random(step)
    lengths = [60, 5, 21, 9, 4, 17, 12] if step == 2 else [3, 30, 8, 25, 11, 6, 14]
    samples = []
    for index, length in enumerate(lengths):
        prompt = length if (step, index) == (2, 1) else draw.randint(1, length - 1)
        mask = tuple(position >= prompt and draw.random() < 0.9 for position in range(length))
        samples.append(
            TrainSample(
                group_id=index // 3,
                sample_index=index % 3,
                tokens=tuple(draw.randrange(VOCABULARY) for _ in range(length)),
                loss_mask=mask,
                rollout_logprobs=tuple(draw.uniform(-5.0, -2.0) if used else 0.0 for used in mask),
                advantage=draw.uniform(-2.0, 2.0),
                temperature=(0.0, 0.7, 1.0)[index % 3],
            )
        )
    return samples


class Rank:
    def __init__(self, part: str, rank: int, ranks: int, directory: Path) -> None:
        self.part, self.rank, self.directory = part, rank, directory
        self.seen: dict[str, Any] = {}
        torch.set_num_threads(1)
        store = dist.FileStore(str(directory / f"{part}.store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

    def keep_weights(self, name: str, backend: FsdpBackend) -> None:
        weights = {key: tensor.numpy() for key, tensor in backend.named_weights(torch.float32)}
        if self.rank == 0:
            np.savez(self.directory / f"{self.part}.{name}.npz", **weights)

    def keep_logprobs(self, name: str, backend: FsdpBackend, samples: list[TrainSample]) -> None:
        self.seen[name] = [values.tolist() for values in backend.logprobs(samples)]

    def steps(self, name: str, backend: FsdpBackend, first: int, last: int) -> None:
        for step in range(first, last + 1):
            metrics = asdict(backend.train_step(step, step_samples(step)))
            self.seen[f"{name}.{step}"] = metrics
            self.keep_weights(f"{name}.{step}", backend)

    def expect_error(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except MilesbatchError as error:
            self.seen[name] = [type(error).__name__, str(error)]

    def finish(self) -> None:
        (self.directory / f"{self.part}.{self.rank}.json").write_text(json.dumps(self.seen))
        dist.barrier()
        dist.destroy_process_group()


def draws() -> list[float]:
    return [random.random(), random.gauss(), float(np.random.standard_normal()), torch.rand(()).item()]


def first_run(rank: Rank) -> None:
    """The uninterrupted run, with a checkpoint in the background between steps 2 and 3; then what else two ranks show."""
    backend, saver = FsdpBackend(tiny_recipe(), tiny_model(), CPU), AsyncSaver()
    rank.seen["tied"] = backend.tied_names()
    rank.keep_logprobs("logprobs", backend, step_samples(2))
    rank.steps("run", backend, 1, 2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank.rank)
    draws()
    checkpoint = rank.directory / "checkpoints" / "000002"
    saver.start(backend.state_dict(), checkpoint)
    rank.seen["draws"] = draws()
    rank.steps("run", backend, 3, STEPS)
    while not saver.is_done:
        time.sleep(0.01)
    saver.wait()
    load_into(backend, checkpoint)
    rank.keep_weights("rolled_back", backend)
    snapshot_is_a_copy(rank, saver)
    update_waits_for_the_copy(rank, saver)
    actions_do_not_hold_up_a_copy(rank, saver)
    failures(rank, saver, backend, checkpoint)


def load_into(backend: FsdpBackend, checkpoint: Path) -> None:
    state = backend.state_dict()
    load(state, checkpoint)
    backend.load_state_dict(state)


def snapshot_is_a_copy(rank: Rank, saver: AsyncSaver) -> None:
    """Megabytes are written while the original is already overwritten."""
    backend = FsdpBackend(tiny_recipe(), tiny_model(tied=False), CPU)
    rank.seen["untied"] = backend.tied_names()
    state = {**backend.state_dict(), f"ballast/{rank.rank}": torch.ones(4_000_000)}
    rank.keep_weights("before_overwriting", backend)
    saver.start(state, rank.directory / "snapshot")
    saver.await_copy()
    tensors = [value for value in state.values() if value.is_floating_point()]
    for tensor in tensors:
        getattr(tensor, "_local_tensor", tensor).fill_(7.0)
    saver.wait()
    load(state, rank.directory / "snapshot")
    rank.keep_weights("after_overwriting", backend)
    rank.seen["ballast"] = [state[f"ballast/{rank.rank}"].min().item(), state[f"ballast/{rank.rank}"].max().item()]


def update_waits_for_the_copy(rank: Rank, saver: AsyncSaver) -> None:
    """A copy that is late, and a step that would be quicker."""
    backend, copy = FsdpBackend(tiny_recipe(), tiny_model(), CPU), saver._staging.copy

    def copy_late(state: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(0.5)
        return copy(state)

    rank.keep_weights("before_update", backend)
    saver._staging.copy = copy_late
    saver.start(backend.state_dict(), rank.directory / "late")
    backend.train_step(1, step_samples(1), saver.await_copy)
    saver._staging.copy = copy
    rank.keep_weights("after_update", backend)
    saver.wait()
    load_into(backend, rank.directory / "late")
    rank.keep_weights("as_saved", backend)


def actions_do_not_hold_up_a_copy(rank: Rank, saver: AsyncSaver) -> None:
    """What is to be done behind a save, and what was put off before it: neither keeps an update waiting."""
    seen: list[str] = []
    release = threading.Event()
    backend, directory = FsdpBackend(tiny_recipe(), tiny_model(), CPU), rank.directory / "actions"

    def afterwards() -> None:
        seen.append("after" if (directory / ".metadata").exists() or rank.rank else "too early")

    saver.later(lambda: seen.append("put off" if release.wait(60) else "never released"))
    saver.start(backend.state_dict(), directory, afterwards)
    saver.await_copy()
    rank.seen["copied_before"] = not seen
    release.set()
    saver.wait()
    rank.seen["actions"] = seen
    saver.later(lambda: rank.directory.joinpath("nowhere", "file").touch())
    try:
        saver.wait()
    except FileNotFoundError:
        rank.seen["action_failed"] = True
    saver.wait()


def failures(rank: Rank, saver: AsyncSaver, backend: FsdpBackend, checkpoint: Path) -> None:
    blocked = rank.directory / f"file.{rank.part}"
    blocked.touch()
    saver.start(backend.state_dict(), blocked / "checkpoint")
    rank.expect_error("failed_save", saver.wait)
    rank.seen["usable_after_failure"] = saver.is_done
    rank.expect_error("missing_checkpoint", lambda: load(backend.state_dict(), rank.directory / "nowhere"))
    shard = checkpoint / "__1_0.distcp"
    whole = shard.read_bytes()
    dist.barrier()
    if rank.rank == 0:
        shard.write_bytes(whole[: len(whole) // 2])
    dist.barrier()
    rank.expect_error("truncated_checkpoint", lambda: load(backend.state_dict(), checkpoint))
    dist.barrier()
    if rank.rank == 0:
        shard.write_bytes(whole)
    state = backend.state_dict()
    del state["model/model.norm.weight"]
    rank.expect_error("incomplete_state", lambda: backend.load_state_dict(state))
    if rank.rank == 0:
        backend.state_dict()["model/model.norm.weight"]._local_tensor[0] = torch.nan
    rank.expect_error("not_finite", lambda: backend.train_step(1, step_samples(1)))


def second_run(rank: Rank) -> None:
    """New processes: continue from the checkpoint; then everything again from the start; then other compute options."""
    backend = FsdpBackend(tiny_recipe(), tiny_model(), CPU)
    load_into(backend, rank.directory / "checkpoints" / "000002")
    rank.seen["draws"] = draws()
    rank.steps("resumed", backend, 3, STEPS)
    rank.steps("again", FsdpBackend(tiny_recipe(), tiny_model(), CPU), 1, STEPS)
    for name, recompute in (("kept", False), ("recomputed", True)):
        model, calls = tiny_model(), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        rank.steps(name, FsdpBackend(tiny_recipe(gradient_checkpointing=recompute), model, CPU), 1, 2)
        rank.seen[f"{name}_forwards"] = len(calls)
    half = FsdpBackend(tiny_recipe(dtype="bfloat16", gradient_checkpointing=True), tiny_model(), CPU)
    rank.steps("bfloat16", half, 1, 2)
    rank.seen["bfloat16_dtypes"] = [str(tensor.dtype) for _, tensor in half.named_weights(torch.bfloat16)]
    rank.seen["moment_dtypes"] = [str(value.dtype) for key, value in half.state_dict().items() if "exp_avg" in key]


def single(rank: Rank) -> None:
    """One rank does the same; then it continues from the checkpoint of two."""
    backend = FsdpBackend(tiny_recipe(), tiny_model(), CPU)
    rank.keep_logprobs("logprobs", backend, step_samples(2))
    rank.seen["alone"] = [backend.logprobs([sample])[0].tolist() for sample in step_samples(2)]
    rank.steps("run", backend, 1, STEPS)
    load_into(backend, rank.directory / "checkpoints" / "000002")
    rank.steps("resharded", backend, 3, STEPS)


def shared_out(rank: Rank) -> None:
    """After a step: the weights whole on every rank, and each tensor at its owner alone."""
    backend = FsdpBackend(tiny_recipe(), tiny_model(), CPU)
    backend.train_step(1, step_samples(1))
    sizes, ranks = backend.weight_sizes(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        whole = {name: tensor.clone() for name, tensor in backend.named_weights(dtype)}
        assert {name: tensor.numel() for name, tensor in whole.items()} == sizes
        for owners in (shares(sizes, ranks), shares(sizes, 1), {name: ranks - 1 for name in sizes}):
            for on_device in (False, True):
                mine = list(backend.named_weights(dtype, owners, on_device=on_device))
                assert [name for name, _ in mine] == [name for name in whole if owners[name] == rank.rank]
                for name, tensor in mine:
                    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == backend.device
                    assert torch.equal(tensor, whole[name]), name
    held, before = (
        dict(backend.named_weights(torch.float32, on_device=True)),
        dict(backend.named_weights(torch.float32)),
    )
    backend.train_step(2, step_samples(2))
    assert not torch.equal(dict(backend.named_weights(torch.float32))[name], before[name])
    assert all(torch.equal(held[name], before[name]) for name in sizes), "copies, and not the weights that are trained"
    rank.seen["owned"] = [name for name in sizes if shares(sizes, ranks)[name] == rank.rank]


PARTS = {"first": first_run, "second": second_run, "single": single}
PARTS.update({f"shared{ranks}": shared_out for ranks in (1, 2, 3)})

if __name__ == "__main__":
    me = Rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    PARTS[me.part](me)
    me.finish()
