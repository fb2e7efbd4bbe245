"""Group-relative advantages: how much better a sample did than its siblings. Pure; no torch.

It never sees tokens. Invariant: the advantages of a group sum to zero (up to rounding), whatever the rewards' scale.

Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1; without the division by the standard deviation it is
Dr. GRPO (arXiv 2503.20783), which removes the extra weight of prompts that are almost always or almost never solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SAME = 1e-9
"""Rewards closer than this (relative to their size) count as equal: dividing by such a spread would amplify rounding."""


def group_advantages(rewards: Sequence[float | None], *, normalize: bool) -> tuple[float | None, ...]:
    """Advantage of each sample of one group, in the order of ``rewards``; None where the reward is None.

    A sample that failed (reward None) is left out of mean and deviation. With ``normalize`` the difference to the mean is
    divided by the population standard deviation of the group. Equal rewards, or a single survivor, give zeros.

    Raises:
        ValueError: a reward is infinite or not a number.
    """
    known = [reward for reward in rewards if reward is not None]
    for reward in known:
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}; only finite numbers can be compared")
    if has_zero_variance(rewards):
        return tuple(None if reward is None else 0.0 for reward in rewards)
    # fsum is exact, so the order of the siblings cannot change a bit of the result.
    mean = math.fsum(known) / len(known)
    scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / len(known)) if normalize else 1.0
    return tuple(None if reward is None else (reward - mean) / scale for reward in rewards)


def has_zero_variance(rewards: Sequence[float | None]) -> bool:
    """True when the group teaches nothing: fewer than two rewards, or all of them equal."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return True
    return max(known) - min(known) <= _SAME * max(abs(reward) for reward in known)
