"""The small form of a recipe: fewer steps and closer checkpoints, everything else as it is. Pure.

Owns: what a drill changes, and saying so. Invariant: the topology (ranks, workers, engine) stays the recipe's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from milesbatch.recipe.freeze import changed_keys
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe

STEPS = 8
SMALL_FORM = (
    f"steps={STEPS}",
    "checkpoint.every=3",
    "checkpoint.keep=2",
    "slurm.heartbeat_s=1",
    "slurm.disk_full_wait_s=120",
    "tracking.kind=none",
    "evaluation=null",
)
"""Enough steps for two checkpoints and work after them; heartbeats that find a hung process in seconds."""


def small_form(path: Path, sets: Sequence[str]) -> tuple[Recipe, tuple[str, ...], tuple[str, ...]]:
    """The recipe as it is drilled, the ``--set`` values that give it (the user's come last, and win), and the changes in words.

    Raises:
        RecipeError: the recipe is not valid.
    """
    whole = load_recipe(path, sets)
    overrides = (*SMALL_FORM, *sets)
    small = load_recipe(path, overrides)
    changes = [f"{change.path}: {change.old!r} -> {change.new!r}" for change in changed_keys(whole, small)]
    return small, overrides, tuple(changes)
