"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from milesbatch.recipe.models import Optimizer


def learning_rate(step: int, steps: int, optimizer: Optimizer) -> float:
    """Learning rate of train step ``step`` (1 is the first) of ``steps``.

    Linear from 0 over ``warmup_steps`` (step ``warmup_steps`` has the peak), then the recipe's shape from the peak towards
    ``min_learning_rate``, which the step after the last would have: no step is lost to a rate of 0. ``cosine`` and
    ``linear`` depend on ``steps``: a run whose ``steps`` were changed replays its recorded steps with other rates.

    Raises:
        ValueError: the step is not one of 1..steps.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not one of 1..{steps}")
    peak = optimizer.learning_rate
    if step <= optimizer.warmup_steps:
        return peak * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    progress = (step - optimizer.warmup_steps - 1) / (steps - optimizer.warmup_steps)
    remaining = 1.0 - progress if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.min_learning_rate + (peak - optimizer.min_learning_rate) * remaining
