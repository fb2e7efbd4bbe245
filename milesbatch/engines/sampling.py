"""Drawing one token for each row of a batch, and the uniform numbers behind the draws.

Owns: temperature, top-k, top-p, inverse CDF, and the logprob that is recorded. Never: keeps state, reads a clock, or
uses a generator that is shared between samples. Invariant: token i of a sample depends on its seed, on i and on its own
logits only, whatever its neighbours in the batch ask for. Top-p is nucleus sampling (Holtzman et al. 2020,
https://arxiv.org/abs/1904.09751); Philox is the counter-based generator of Salmon et al. 2011 (Random123).

Shape legend: N rows of the batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


def response_uniforms(seed: int, count: int) -> npt.NDArray[np.float64]:
    """The uniform numbers in [0, 1) that decide a whole response; number i decides token i, whatever ``count`` is."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How each row draws.

    Shapes: all N. ``temperature`` is 1 in greedy rows; ``top_k`` is V or more where every token may be drawn; ``greedy``
    is None when no row is greedy, ``top_p`` and ``top_k`` are None when no row restricts its support.
    """

    temperature: torch.Tensor
    uniforms: torch.Tensor | None
    """float64 in [0, 1); None when every row is greedy."""
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None


def draw_tokens(logits_NV: torch.Tensor, rule: DrawRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row; return tokens (int64, N) and their logprobs (float32, N).

    The logprob is that of softmax(logits / temperature) in float32, untouched by top-k and top-p. Rows with logits that
    are not finite give an in-range token and a logprob that is not finite.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float().div(rule.temperature[:, None]), dim=-1)
    if rule.uniforms is None:
        tokens_N = logits_NV.argmax(dim=-1)
    else:
        probs_NV = logprobs_NV.exp()
        if rule.top_p is not None and rule.top_k is not None:
            probs_NV = probs_NV.mul_(support(probs_NV, rule.top_p, rule.top_k))
        tokens_N = _inverse_cdf(probs_NV, rule.uniforms)
        if rule.greedy is not None:
            tokens_N = torch.where(rule.greedy, logits_NV.argmax(dim=-1), tokens_N)
    return tokens_N, logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)


def support(probs_NV: torch.Tensor, top_p_N: torch.Tensor, top_k_N: torch.Tensor) -> torch.Tensor:
    """Which tokens each row may draw (bool, N x V): the k likeliest, and of those the smallest set that holds p of the rest.

    Equal probabilities rank by token id, so that a tie at the edge is decided the same way every time.
    """
    ranked_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_NV.shape[-1], device=probs_NV.device)
    keep_NV = rank_V < top_k_N[:, None]
    ranked_NV = (ranked_NV * keep_NV).double()
    mass_NV = ranked_NV.cumsum(dim=-1)
    # The mass before a token decides, so the likeliest token always stays. Rows with p = 1 skip the comparison: rounding
    # in the running sum must not cut their tail.
    before_NV = mass_NV - ranked_NV
    keep_NV &= (before_NV < top_p_N[:, None] * mass_NV[:, -1:]) | (top_p_N[:, None] >= 1)
    return torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV)


def _inverse_cdf(probs_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    # float64: with a large vocabulary, float32 steps near 1 are wider than the probability of a rare token.
    cdf_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    # A uniform number is at most 1 - 2**-53, and that times the total rounds to less than the total: the target always
    # lies inside a token, and `right` finds the one that holds it, never one of probability 0.
    target_N1 = uniforms_N[:, None] * cdf_NV[:, -1:]
    return torch.searchsorted(cdf_NV, target_N1, right=True).squeeze(1).clamp_(max=probs_NV.shape[-1] - 1)
