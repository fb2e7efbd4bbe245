"""Which run a fork comes from, and in which settings it differs, from the fork's own files.

Owns nothing but reading; never looks for the parent, which need not exist any more. The page behind it is ``docs/forks.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milesbatch.recipe.freeze import ABSENT, changed_keys
from milesbatch.recipe.load import load_recipe
from milesbatch.records import ForkedFrom, RunRecord
from milesbatch.store.layout import RunLayout


@dataclass(frozen=True, slots=True)
class Lineage:
    """A fork's parent; ``changes``: field, the parent's value, the fork's (None where one has no such field)."""

    forked_from: ForkedFrom
    changes: tuple[tuple[str, Any, Any], ...]


def read_lineage(layout: RunLayout, record: RunRecord | None) -> Lineage | None:
    """None when the run is no fork.

    Raises:
        MilesbatchError: one of the two recipes cannot be read.
    """
    if record is None or record.forked_from is None:
        return None
    found = changed_keys(load_recipe(layout.parent_recipe), load_recipe(layout.recipe))
    return Lineage(record.forked_from, tuple((each.path, _present(each.old), _present(each.new)) for each in found))


def _present(value: Any) -> Any:
    return None if value is ABSENT else value


def parent_in_words(fork: ForkedFrom) -> str:
    return f"step {fork.step} of {fork.path} (run {fork.run_id})"
