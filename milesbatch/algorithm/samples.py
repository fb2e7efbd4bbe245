"""What the trainer learns from: one sample as plain numbers. No torch, no I/O.

It never judges a sample; rewards became an advantage before (:mod:`milesbatch.algorithm.advantages`). Invariant: a
``TrainSample`` that exists can be trained on, so nothing below checks it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion of one prompt, ready for the loss.

    Shapes: ``tokens``, ``loss_mask`` and ``rollout_logprobs`` have equal length T >= 1 and speak of the same position:
    entry i is token i, whether the policy wrote it, and the natural log of the probability with which the rollout
    drew it (0 where the mask is false). Position 0 has nothing before it and is never a loss token.

    Raises:
        ValueError: the lengths differ, or a number is not finite or not possible; names group and sample.
    """

    group_id: int
    sample_index: int
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float
    temperature: float = 1.0
    """Of the sampling; logprobs are those of softmax(logits / temperature), and 0 (greedy) counts as 1."""

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise ValueError(f"group {self.group_id}, sample {self.sample_index}: {fault}")

    def _fault(self) -> str:
        lengths = (len(self.tokens), len(self.loss_mask), len(self.rollout_logprobs))
        if len(set(lengths)) != 1 or not self.tokens:
            return f"tokens, loss_mask and rollout_logprobs need one length of at least 1, found {lengths}"
        if self.loss_mask[0]:
            return "the first token is marked as written by the policy, but nothing precedes it"
        if not math.isfinite(self.advantage):
            return f"the advantage is {self.advantage}"
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"the temperature is {self.temperature}"
        for position, logprob in enumerate(self.rollout_logprobs):
            if not math.isfinite(logprob):
                return f"the rollout logprob at position {position} is {logprob}"
        return ""

    @property
    def key(self) -> tuple[int, int]:
        """(group id, sample index): unique within a step."""
        return (self.group_id, self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.tokens)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.loss_mask)
