"""What a fork may not change of its parent's recipe, and what a new recipe must fit. Pure.

Owns the refusals; never the taking over (``milesbatch/forks``). Invariant: what is refused could not be trained on from the
parent's state, or would be another model under the same name. The page behind it is ``docs/forks.md``.
"""

from __future__ import annotations

from typing import Final

from milesbatch.errors import RunMismatchError
from milesbatch.recipe.freeze import changed_keys
from milesbatch.recipe.models import Recipe

FIXED: Final = ("model.", "weights.dtype")
"""Fields that a fork keeps; a name that ends with a dot stands for its whole section."""


def refuse_fork(parent: Recipe, wanted: Recipe, *, step: int, first_group: int, has_gaps: bool) -> None:
    """Return when ``wanted`` can go on from the state of ``parent`` behind ``step``.

    ``first_group`` is the first group that has no fate there; ``has_gaps``: some later ones have one.

    Raises:
        RunMismatchError: it cannot; names the fields, the values and what is allowed.
    """
    kept = [change for change in changed_keys(parent, wanted) if change.path.startswith(FIXED)]
    if kept:
        listing = "\n".join(f"    {change.path}: {change.old!r} -> {change.new!r}" for change in kept)
        raise RunMismatchError(
            f"a fork keeps its parent's model, tokenizer and type of weights; these keys differ:\n{listing}",
            mend="leave them as they are; for another model start a new run with --run-dir",
        )
    if wanted.steps <= step:
        raise RunMismatchError(
            f"steps is {wanted.steps}, and the fork begins behind step {step}: nothing would be trained",
            mend=f"give more with --set steps={step + 1} or above (steps go on counting), or an earlier one with --fork-step",
        )
    if wanted.determinism != "bitwise":
        return
    if has_gaps:
        raise RunMismatchError(
            f"determinism is bitwise, but behind step {step} of the parent, which is relaxed, groups above {first_group} are"
            " trained already: no fixed order goes on from there",
            mend="leave determinism: relaxed, or choose another step with --fork-step",
        )
    size = wanted.rollout.groups_per_lease
    if first_group % size:
        per_step = wanted.trainer.groups_per_step
        allowed = [d for d in range(1, per_step + 1) if first_group % d == 0 and per_step % d == 0]
        raise RunMismatchError(
            f"rollout.groups_per_lease is {size}, and the fork goes on with group {first_group}, which is inside a block",
            mend=f"give one that divides {first_group} and trainer.groups_per_step ({per_step}): {allowed}",
        )
