"""Runs side by side: in which recipe keys they differ, and how their outcomes do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milesbatch.catalogue.entry import Entry

OUTCOMES = (
    "state",
    "step",
    "reward_first",
    "reward_last",
    "reward_best",
    "reward_best_step",
    "eval_last",
    "eval_best",
    "eval_best_version",
    "lag_mean",
    "failed_share",
    "truncated_share",
    "rejected_groups",
    "tokens",
    "train_s",
    "wait_s",
    "replayed_steps",
    "recovered",
    "cause",
)
LINEAGE = ("run_id", "parent_run_id", "parent_step")
_NOT_A_CHOICE = frozenset({"name"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Values of each key, one for each run in the order given; ``recipe`` holds only keys that differ, ``lineage`` says which
    run is a fork of which, and is empty when none is."""

    runs: tuple[str, ...]
    recipe: dict[str, tuple[Any, ...]]
    outcomes: dict[str, tuple[Any, ...]]
    lineage: dict[str, tuple[Any, ...]]


def compare(entries: Sequence[Entry]) -> Comparison:
    """What differs between ``entries``; a key that one recipe does not have is null there."""
    keys = sorted({key for entry in entries for key in entry.recipe} - _NOT_A_CHOICE)
    recipe = {key: tuple(entry.recipe.get(key) for entry in entries) for key in keys}
    differing = {key: values for key, values in recipe.items() if any(value != values[0] for value in values)}
    outcomes = {key: tuple(getattr(entry, key) for entry in entries) for key in OUTCOMES}
    has_forks = any(entry.parent_run_id is not None for entry in entries)
    lineage = {key: tuple(getattr(entry, key) for entry in entries) for key in LINEAGE if has_forks}
    return Comparison(tuple(entry.path for entry in entries), differing, outcomes, lineage)
