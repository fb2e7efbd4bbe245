"""The loss of a train step, token by token. Needs torch; no collectives, no model.

It never normalises by what one microbatch or rank happens to hold: the divisor is the number of loss tokens of the whole
step, known before the first forward pass. Invariant: the sum of all parts' losses is the step's loss, however samples were
spread over ranks and microbatches. All arithmetic is in float32.

Legend of shapes: N loss tokens, V vocabulary.

Sources: clipped surrogate of PPO (arXiv 1707.06347) with group advantages (arXiv 2402.03300); mean over tokens and the
separate upper clip of DAPO (arXiv 2503.14476); KL estimators of Schulman, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from milesbatch.recipe.models import Algorithm

_LOG_RATIO_LIMIT = 20.0
"""exp(20) is far beyond any clip; without a limit a broken logprob would turn into inf and then NaN."""

SUM_NAMES = ("loss", "kl", "entropy", "clipped", "ratio", "logprob_difference")
MAXIMUM_NAMES = ("ratio", "logprob_difference")


def log_softmax(logits_NV: torch.Tensor, temperatures_N: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [N, V] in float32 of softmax(logits / temperature)."""
    return torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=-1)


def pick(logprobs_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Log-probability [N] of each target."""
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0]


def entropy(logprobs_NV: torch.Tensor) -> torch.Tensor:
    """Entropy [N] in nats of each distribution."""
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def kl_estimate(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Estimate [N] of KL(policy || reference) from tokens that the policy drew; r = reference / policy probability.

    ``k1`` = -log r: unbiased, often negative; its gradient is zero on average when the tokens are on-policy, so it measures
    but hardly regularises. ``k2`` = (log r)^2 / 2: biased value, right gradient. ``k3`` = r - 1 - log r: unbiased, never
    negative.
    """
    log_r = reference_N - logprobs_N
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return torch.expm1(log_r.clamp(max=_LOG_RATIO_LIMIT)) - log_r


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The clipped policy term: ``loss`` [N] to minimise, ``ratio`` [N], ``clipped`` [N] true where no gradient flows."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def surrogate(
    logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float
) -> Surrogate:
    """PPO's pessimistic surrogate -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) per token."""
    ratio = (logprobs_N - rollout_logprobs_N).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    limited = ratio.clamp(1.0 - low, 1.0 + high)
    loss = -torch.minimum(ratio * advantages_N, limited * advantages_N)
    clipped = ((ratio > 1.0 + high) & (advantages_N > 0)) | ((ratio < 1.0 - low) & (advantages_N < 0))
    return Surrogate(loss, ratio.detach(), clipped)


@dataclass(frozen=True, slots=True)
class LossPart:
    """What one microbatch adds to the step.

    ``loss`` is a scalar with gradient, already divided by the step's tokens: parts add up. ``sums`` (float64, in the order of
    ``SUM_NAMES``) are sums over the part's tokens; ``maxima`` (float64, ``MAXIMUM_NAMES``) are maxima, 0 without tokens.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    maxima: torch.Tensor


def grpo_loss(
    algorithm: Algorithm,
    total_tokens: int,
    logprobs_NV: torch.Tensor,
    targets_N: torch.Tensor,
    rollout_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor | None,
) -> LossPart:
    """Part of the step's loss: (sum of surrogate + kl_coef * KL - entropy_coef * entropy) / ``total_tokens``.

    ``reference_logprobs_N`` is None when no reference model is kept; the KL then counts as 0.
    """
    logprobs_N = pick(logprobs_NV, targets_N)
    policy = surrogate(logprobs_N, rollout_logprobs_N, advantages_N, algorithm.clip_low, algorithm.clip_high)
    token_loss = policy.loss
    kl = torch.zeros_like(logprobs_N)
    if reference_logprobs_N is not None:
        kl = kl_estimate(logprobs_N, reference_logprobs_N, algorithm.kl_estimator)
        token_loss = token_loss + algorithm.kl_coef * kl
    # Without a bonus the entropy is only watched: no [N, V] activations are kept for its gradient.
    spread = entropy(logprobs_NV if algorithm.entropy_coef else logprobs_NV.detach())
    if algorithm.entropy_coef:
        token_loss = token_loss - algorithm.entropy_coef * spread
    difference = (logprobs_N.detach() - rollout_logprobs_N).abs()
    per_token = (token_loss, kl, spread, policy.clipped, policy.ratio, difference)
    return LossPart(
        loss=token_loss.sum() / max(1, total_tokens),
        sums=torch.stack([values.detach().double().sum() for values in per_token]),
        maxima=torch.stack([_maximum(policy.ratio), _maximum(difference)]),
    )


def _maximum(values: torch.Tensor) -> torch.Tensor:
    return values.double().max() if len(values) else values.new_zeros((), dtype=torch.float64)
