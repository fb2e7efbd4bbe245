from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch

from milesbatch.algorithm.losses import (
    MAXIMUM_NAMES,
    SUM_NAMES,
    LossPart,
    entropy,
    grpo_loss,
    kl_estimate,
    log_softmax,
    pick,
    surrogate,
)
from milesbatch.recipe.models import Algorithm

N, V = 6, 5


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(N, V, generator=draw),
        "targets": torch.randint(V, (N,), generator=draw),
        "rollout": -3 * torch.rand(N, generator=draw),
        "advantages": torch.randn(N, generator=draw),
        "reference": -3 * torch.rand(N, generator=draw),
    }


def part(values: dict[str, torch.Tensor], tokens: int = N, place: slice = slice(None), **options: Any) -> LossPart:
    reference = values["reference"][place] if options.get("kl_coef") else None
    logprobs = log_softmax(values["logits"], torch.ones(N))[place]
    rest = [values[name][place] for name in ("targets", "rollout", "advantages")]
    return grpo_loss(Algorithm.model_validate(options), tokens, logprobs, *rest, reference)


def gradient(values: dict[str, torch.Tensor], *places: slice, **options: Any) -> torch.Tensor:
    logits = values["logits"].clone().requires_grad_()
    for place in places or (slice(None),):
        part({**values, "logits": logits}, place=place, **options).loss.backward()
    assert logits.grad is not None
    return logits.grad


def test_logprobs_are_those_of_the_tempered_softmax_in_float32() -> None:
    logits, temperatures = torch.tensor([[2.0, 0.0], [2.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1.0, 2.0])
    found = log_softmax(logits, temperatures)
    assert found.dtype == torch.float32
    assert pick(found, torch.tensor([0, 1])).tolist() == pytest.approx(
        [-math.log(1 + math.exp(-2)), -math.log(1 + math.exp(1))]
    )


def test_entropy_of_uniform_and_certain() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [300.0, 0.0, 0.0, 0.0]])
    assert entropy(log_softmax(logits, torch.ones(2))).tolist() == pytest.approx([math.log(4), 0.0])


# -- KL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Literal["k1", "k3"]) -> None:
    draw = torch.Generator().manual_seed(1)
    p, q = (torch.log_softmax(torch.randn(V, generator=draw, dtype=torch.float64), -1) for _ in range(2))
    exact = (p.exp() * (p - q)).sum().item()
    assert exact > 0.1
    # The expectation over the policy, written out over the whole vocabulary.
    assert (p.exp() * kl_estimate(p, q, estimator)).sum().item() == pytest.approx(exact, rel=1e-9)


def test_k2_has_the_right_gradient_and_k1_none() -> None:
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(V, generator=draw, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(V, generator=draw, dtype=torch.float64), -1)
    p = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    estimates = {
        name: torch.autograd.grad((p.exp().detach() * kl_estimate(p, q, name)).sum(), logits, retain_graph=True)[0]
        for name in ("k1", "k2")
    }
    torch.testing.assert_close(estimates["k2"], exact)
    torch.testing.assert_close(estimates["k1"], torch.zeros_like(exact))


def test_estimators_by_hand() -> None:
    policy, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 + math.log(2), -1.0])
    assert kl_estimate(policy, reference, "k1").tolist() == pytest.approx([-math.log(2), 0.0])
    assert kl_estimate(policy, reference, "k2").tolist() == pytest.approx([0.5 * math.log(2) ** 2, 0.0])
    assert kl_estimate(policy, reference, "k3").tolist() == pytest.approx([1 - math.log(2), 0.0])


def test_k3_is_never_negative_nor_infinite() -> None:
    policy = torch.tensor([-200.0, -1.0, -1.0 - 1e-4])
    found = kl_estimate(policy, torch.tensor([-1.0, -200.0, -1.0]), "k3")
    assert (found >= 0).all()
    assert found.isfinite().all()


# -- clipping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.2, 1.0, -1.2, False),
        (1.5, 1.0, -1.3, True),
        (1.5, -1.0, 1.5, False),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.9, True),
        (0.95, -1.0, 0.95, False),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_the_two_clips(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    found = surrogate(logprob, torch.zeros(1), torch.tensor([advantage]), low=0.1, high=0.3)
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(loss)
    assert found.clipped.item() is clipped
    assert logprob.grad is not None
    assert (logprob.grad.item() == 0) is (clipped or advantage == 0)


def test_a_broken_logprob_stays_finite() -> None:
    found = surrogate(torch.tensor([0.0, -900.0]), torch.tensor([-900.0, 0.0]), torch.tensor([0.0, -1.0]), 0.2, 0.2)
    assert found.loss.isfinite().all()
    assert found.ratio.isfinite().all()


# -- the whole loss -----------------------------------------------------------------------------------------------

FULL = {"kl_coef": 0.3, "entropy_coef": 0.2, "kl_estimator": "k3"}


def naive_loss(values: dict[str, torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """The same loss with the standard library's view of it: one token at a time."""
    total = torch.zeros(())
    for row in range(N):
        distribution = torch.distributions.Categorical(logits=logits[row])
        logprob = distribution.log_prob(values["targets"][row])
        ratio, advantage = torch.exp(logprob - values["rollout"][row]), values["advantages"][row]
        gain = min(ratio * advantage, min(max(ratio, torch.tensor(0.8)), torch.tensor(1.28)) * advantage)
        r = torch.exp(values["reference"][row] - logprob)
        total = total - gain + 0.3 * (r - 1 - torch.log(r)) - 0.2 * distribution.entropy()
    return total / N


@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_against_a_naive_loss(seed: int) -> None:
    values = inputs(seed)
    logits = values["logits"].clone().requires_grad_()
    expected = naive_loss(values, logits)
    expected.backward()
    assert part(values, **FULL).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient(values, **FULL), logits.grad, rtol=1e-5, atol=1e-6)


def test_uneven_parts_add_up_to_the_token_mean() -> None:
    values = inputs()
    whole = part(values, **FULL)
    parts = [part(values, place=place, **FULL) for place in (slice(0, 1), slice(1, 6), slice(6, 6))]
    assert sum(one.loss.item() for one in parts) == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(sum(one.sums for one in parts), whole.sums)
    torch.testing.assert_close(torch.stack([one.maxima for one in parts]).amax(0), whole.maxima)
    split = gradient(values, slice(0, 1), slice(1, 6), slice(6, 6), **FULL)
    torch.testing.assert_close(split, gradient(values, **FULL))


def test_metrics_are_sums_and_maxima() -> None:
    values = inputs()
    found = part(values, tokens=2 * N)
    sums = dict(zip(SUM_NAMES, found.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMUM_NAMES, found.maxima.tolist(), strict=True))
    logprobs = torch.log_softmax(values["logits"], -1)
    picked = logprobs[torch.arange(N), values["targets"]]
    difference, ratio = (picked - values["rollout"]).abs(), (picked - values["rollout"]).exp()
    assert found.loss.item() == pytest.approx(sums["loss"] / (2 * N), rel=1e-6)
    assert sums["kl"] == 0.0
    assert sums["entropy"] == pytest.approx(-(logprobs.exp() * logprobs).sum().item(), rel=1e-5)
    assert sums["logprob_difference"] == pytest.approx(difference.sum().item(), rel=1e-5)
    assert maxima["logprob_difference"] == pytest.approx(difference.max().item())
    assert sums["ratio"] == pytest.approx(ratio.sum().item(), rel=1e-5)
    assert maxima["ratio"] == pytest.approx(ratio.max().item())
    assert sums["clipped"] == int(sums["clipped"])


def test_the_entropy_bonus_pushes_towards_uniform() -> None:
    values = inputs()
    values["advantages"].zero_()
    logits = values["logits"] - gradient(values, entropy_coef=1.0)
    before, after = (entropy(log_softmax(one, torch.ones(N))).sum() for one in (values["logits"], logits))
    assert after > before
    assert not gradient(values).any()


def test_nothing_to_learn_from_is_zero_with_a_gradient() -> None:
    values = inputs()
    empty = part(values, tokens=0, place=slice(0, 0), **FULL)
    assert empty.loss.item() == 0.0
    assert empty.sums.tolist() == [0.0] * len(SUM_NAMES)
    assert empty.maxima.tolist() == [0.0] * len(MAXIMUM_NAMES)
    assert not gradient(values, slice(0, 0), **FULL).any()
