"""The FSDP2 backend with two real processes and one, against a plain model without packing, sharding or checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_ranks import CPU, STEPS, step_samples, tiny_model, tiny_recipe

from milesbatch.algorithm.samples import TrainSample
from milesbatch.algorithm.schedule import learning_rate
from milesbatch.backends.fsdp import FsdpBackend
from milesbatch.errors import ModelError

PROGRAM = Path(__file__).with_name("fsdp_ranks.py")


class Seen:
    """What the ranks of all parts wrote down."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def of(self, part: str, rank: int = 0) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads((self.directory / f"{part}.{rank}.json").read_text())
        return seen

    def weights(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.directory / f"{name}.npz") as stored:
            return dict(stored)

    def difference(self, left: str, right: str) -> float:
        """Largest absolute difference of two sets of weights; the names and their order must be the same."""
        one, other = self.weights(left), self.weights(right)
        assert list(one) == list(other)
        return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def start(part: str, ranks: int, directory: Path) -> None:
    command = [sys.executable, str(PROGRAM), part]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("ranks")
    for part, ranks in (("first", 2), ("second", 2), ("single", 1)):
        start(part, ranks, directory)
    return Seen(directory)


# -- a reference without packing, sharding or this project's loss -----------------------------------------------------


def naive_logprobs(model: torch.nn.Module, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob and entropy at positions 1.. of one sample alone."""
    logits = model(input_ids=torch.tensor([sample.tokens])).logits[0, :-1]
    distribution = torch.distributions.Categorical(logits=logits / (sample.temperature or 1.0))
    return distribution.log_prob(torch.tensor(sample.tokens[1:])), distribution.entropy()


def naive_loss(model: torch.nn.Module, reference: torch.nn.Module, samples: list[TrainSample]) -> torch.Tensor:
    total, count = torch.zeros(()), 0
    for sample in samples:
        logprobs, entropies = naive_logprobs(model, sample)
        with torch.no_grad():
            reference_logprobs, _ = naive_logprobs(reference, sample)
        for position in range(1, sample.num_tokens):
            if not sample.loss_mask[position]:
                continue
            logprob = logprobs[position - 1]
            ratio = torch.exp(logprob - sample.rollout_logprobs[position])
            # clip_low 0.2 and clip_high 0.28, written out: no gain beyond the clip in the direction of the advantage.
            gain = ratio * sample.advantage
            gain = min(gain, torch.clamp(ratio, 0.8, 1.28) * sample.advantage)
            log_r = reference_logprobs[position - 1] - logprob
            total = total - gain + 0.1 * (torch.exp(log_r) - 1 - log_r) - 0.01 * entropies[position - 1]
            count += 1
    return total / count


def naive_run(steps: int) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and final weights of plain training."""
    model, reference, recipe = tiny_model(), tiny_model(), tiny_recipe()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3)
    losses, norms = [], []
    for step in range(1, steps + 1):
        loss = naive_loss(model, reference, step_samples(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, recipe.trainer.optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("part", ["first", "single"])
def test_steps_are_those_of_plain_training(seen: Seen, part: str) -> None:
    losses, norms, weights = naive_run(2)
    found = seen.weights(f"{part}.run.2")
    metrics = [seen.of(part)[f"run.{step}"] for step in (1, 2)]
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-4)
    assert list(found) == list(weights)
    assert max(np.abs(found[name] - weights[name]).max() for name in weights) < 1e-5
    started = {name: p.detach().numpy() for name, p in tiny_model().named_parameters()}
    assert max(np.abs(found[name] - started[name]).max() for name in weights) > 1e-2


@pytest.mark.parametrize("part", ["first", "single"])
def test_packed_logprobs_are_those_of_each_sample_alone(seen: Seen, part: str) -> None:
    model = tiny_model()
    for sample, found in zip(step_samples(2), seen.of(part)["logprobs"], strict=True):
        with torch.no_grad():
            expected = naive_logprobs(model, sample)[0]
        expected = torch.where(torch.tensor(sample.loss_mask[1:]), expected, 0.0).tolist()
        assert found == pytest.approx([0.0, *expected], abs=1e-5)
    alone = seen.of("single")["alone"]
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(alone, seen.of(part)["logprobs"], strict=True))


# -- ranks --------------------------------------------------------------------------------------------------------


def test_two_ranks_equal_one(seen: Seen) -> None:
    for step in range(1, STEPS + 1):
        assert seen.difference(f"first.run.{step}", f"single.run.{step}") < 1e-5
        two, one = seen.of("first")[f"run.{step}"], seen.of("single")[f"run.{step}"]
        for name in set(two) - {"seconds", "microbatches"}:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_metrics_are_the_same_on_all_ranks_and_count_everything(seen: Seen) -> None:
    for step in range(1, STEPS + 1):
        metrics, samples = seen.of("first", 0)[f"run.{step}"], step_samples(step)
        assert metrics == seen.of("first", 1)[f"run.{step}"]
        assert metrics["step"] == step
        assert metrics["samples"] == len(samples)
        assert metrics["tokens"] == sum(sample.num_tokens for sample in samples)
        assert metrics["loss_tokens"] == sum(sample.num_loss_tokens for sample in samples)
    second = seen.of("first")["run.2"]
    assert 0 < second["clip_share"] < 1
    assert second["kl"] > 0.01
    assert second["ratio_max"] > second["ratio_mean"] > 0
    assert second["logprob_difference_max"] > second["logprob_difference_mean"] > 0
    assert second["microbatches"] > 1
    assert seen.of("first")["run.1"]["kl"] == 0.0


def test_empty_step_moves_only_by_momentum(seen: Seen) -> None:
    metrics = seen.of("first")["run.3"]
    assert (metrics["loss"], metrics["grad_norm"], metrics["loss_tokens"]) == (0.0, 0.0, 0)
    assert all(np.isfinite(value).all() for value in seen.weights("first.run.3").values())
    assert 0 < seen.difference("first.run.2", "first.run.3") < 0.1


def test_tied_parameters_appear_once(seen: Seen) -> None:
    assert seen.of("first")["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in seen.weights("first.run.1")
    assert seen.of("first")["untied"] == {}
    assert "lm_head.weight" in seen.weights("first.before_overwriting")


def test_named_weights_load_into_the_model(seen: Seen) -> None:
    stored = {name: torch.from_numpy(value) for name, value in seen.weights("first.run.4").items()}
    missing = tiny_model().load_state_dict(stored, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3))])
def test_each_rank_gathers_only_what_it_owns(tmp_path: Path, ranks: int) -> None:
    """The bits are those of the whole weights, also where the first dimension does not divide by the ranks."""
    part = f"shared{ranks}"
    start(part, ranks, tmp_path)
    owned = [Seen(tmp_path).of(part, rank)["owned"] for rank in range(ranks)]
    assert all(owned)
    names = [name for share in owned for name in share]
    assert len(names) == len(set(names))


# -- the same bits again ------------------------------------------------------------------------------------------


def test_a_second_run_gives_the_same_bits(seen: Seen) -> None:
    for step in range(1, STEPS + 1):
        assert seen.difference(f"first.run.{step}", f"second.again.{step}") == 0.0
        assert without_time(seen.of("first")[f"run.{step}"]) == without_time(seen.of("second")[f"again.{step}"])


def test_a_resumed_run_gives_the_same_bits(seen: Seen) -> None:
    for step in range(3, STEPS + 1):
        assert seen.difference(f"first.run.{step}", f"second.resumed.{step}") == 0.0
        # The KL among them: the reference is the starting model, not the one that was loaded.
        assert without_time(seen.of("first")[f"run.{step}"]) == without_time(seen.of("second")[f"resumed.{step}"])
    assert seen.difference("first.run.3", "first.run.4") > 1e-4
    assert seen.difference("first.run.2", "first.rolled_back") == 0.0


def test_random_state_is_that_of_each_rank(seen: Seen) -> None:
    draws = [[seen.of(part, rank)["draws"] for rank in (0, 1)] for part in ("first", "second")]
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(*draws[0], strict=True))


def test_checkpoint_of_two_ranks_continues_on_one(seen: Seen) -> None:
    assert seen.difference("first.run.4", "single.resharded.4") < 1e-5


def test_snapshot_does_not_see_later_changes(seen: Seen) -> None:
    assert seen.difference("first.before_overwriting", "first.after_overwriting") == 0.0
    assert seen.of("first", 0)["ballast"] == seen.of("first", 1)["ballast"] == [1.0, 1.0]


def test_an_update_waits_until_the_state_before_it_is_copied(seen: Seen) -> None:
    assert seen.difference("first.before_update", "first.as_saved") == 0.0
    assert seen.difference("first.before_update", "first.after_update") > 0.0


def test_what_is_put_off_runs_in_the_background(seen: Seen) -> None:
    for rank in (0, 1):
        assert seen.of("first", rank)["copied_before"] is True
        assert sorted(seen.of("first", rank)["actions"]) == ["after", "put off"]
        assert seen.of("first", rank)["action_failed"] is True


# -- compute options ----------------------------------------------------------------------------------------------


def test_recomputing_activations_changes_nothing_but_the_work(seen: Seen) -> None:
    assert seen.difference("second.kept.2", "second.recomputed.2") < 1e-6
    second = seen.of("second")
    assert second["recomputed_forwards"] > second["kept_forwards"]


def test_bfloat16_computes_and_keeps_float32_masters(seen: Seen) -> None:
    second = seen.of("second")
    assert 0 < seen.difference("second.bfloat16.2", "first.run.2") < 0.05
    assert second["bfloat16.2"]["grad_norm"] == pytest.approx(seen.of("first")["run.2"]["grad_norm"], rel=0.1)
    assert set(second["bfloat16_dtypes"]) == {"torch.bfloat16"}
    assert set(second["moment_dtypes"]) == {"torch.float32"}


# -- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("failed_save", "StorageError", "Not a directory"),
        ("missing_checkpoint", "CorruptArtefactError", "nowhere"),
        ("truncated_checkpoint", "CorruptArtefactError", "000002"),
        ("incomplete_state", "CorruptArtefactError", "model/model.norm.weight"),
        ("not_finite", "RunFailedError", "step 1"),
    ],
)
def test_failures_are_named_on_every_rank(seen: Seen, name: str, kind: str, words: str, rank: int) -> None:
    found = seen.of("first", rank)[name]
    assert found[0] == kind
    assert words in found[1]
    assert "what to do" in found[1]


def test_a_failed_save_does_not_block_the_next(seen: Seen) -> None:
    assert seen.of("first")["usable_after_failure"] is True


def test_models_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ModelError, match="bfloat16"):
        FsdpBackend(tiny_recipe(), tiny_model().to(torch.bfloat16), CPU)
    with pytest.raises(ModelError, match="sliding window 8"):
        FsdpBackend(tiny_recipe(), tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=1), CPU)


def without_time(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "seconds"}
