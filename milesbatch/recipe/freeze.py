"""Which fields of a frozen recipe differ from a new one, and which of them a run may take over.

Owns: the list of fields that may change in a living run. Never: the decision (the command line refuses or goes on),
files. Invariant: a change that could alter a step that was already recorded may not change. The page behind it is
``docs/recipe.md``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from milesbatch.recipe.dotted import dotted
from milesbatch.recipe.layers import assign
from milesbatch.recipe.load import validate_document
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.yaml_text import Document

MAY_CHANGE: Final = (
    "steps",
    "checkpoint.",
    "slurm.",
    "tracking.",
    "evaluation",
    "evaluation.",
    "rollout.workers",
    "rollout.sglang.",
    "rollout.lease_s",
    "weights.retire",
    "weights.diff_on",
    "weights.transport",
    "weights.broadcast_timeout_s",
    "weights.broadcast_bucket_bytes",
    "environment.max_failed_share",
    "environment.failed_window",
)
"""Fields that a continued run may change; a name that ends with a dot stands for its whole section."""


class Absent(enum.Enum):
    """Stands for a field that one of two recipes does not have, as after a change of ``kind``."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final[Literal[Absent.ABSENT]] = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class Change:
    """A field that differs: values as JSON, :data:`ABSENT` where one recipe lacks it."""

    path: str
    old: Any
    new: Any
    may_change: bool

    def __str__(self) -> str:
        verdict = "may change" if self.may_change else "may not change in this run"
        return f"{self.path}: {self.old!r} -> {self.new!r} ({verdict})"


def changed_keys(frozen: Recipe, new: Recipe) -> list[Change]:
    """Fields of ``new`` that differ from the run's ``frozen`` recipe, in the order of the models."""
    before, after = dotted(frozen.model_dump(mode="json")), dotted(new.model_dump(mode="json"))
    # The length of a cosine or linear schedule shapes every step, the recorded ones too.
    fixed_steps = any(recipe.trainer.optimizer.schedule != "constant" for recipe in (frozen, new))
    changes = []
    for path in dict.fromkeys([*before, *after]):
        old, now = before.get(path, ABSENT), after.get(path, ABSENT)
        if old != now:
            changes.append(Change(path, old, now, _may_change(path) and not (path == "steps" and fixed_steps)))
    return changes


def with_changes(frozen: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """``frozen`` with the fields at dotted paths set to JSON values, validated again.

    Raises:
        RecipeError: the result is not a valid recipe.
    """
    origin = "changes of the run"
    assignments = []
    for name, value in changes.items():
        path = tuple(name.split("."))
        assignments.append((path, Document(value, {path: origin})))
    document = assign(Document(frozen.model_dump(mode="json"), {}), assignments)
    return validate_document(document, "the run's recipe with its changes")


def _may_change(path: str) -> bool:
    return any(path.startswith(name) if name.endswith(".") else path == name for name in MAY_CHANGE)
