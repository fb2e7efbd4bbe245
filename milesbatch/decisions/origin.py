"""Where a run begins: at the starting model, or, when it is a fork, behind a step of its parent. Pure.

A fork's steps, policy versions and groups go on counting where the parent's stood, so every rule that says "from the first
one on" asks here which one that is. Owns nothing else. The page behind it is ``docs/forks.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from milesbatch.records import ForkedFrom, RunRecord


@dataclass(frozen=True, slots=True)
class Origin:
    """The state that a run was given, which none of its own records tells of."""

    step: int = 0
    """Its own batch records begin with ``step + 1``; its first state is that after ``step``: policy version ``step``."""
    first_version: int = 0
    """Oldest policy version that it has: below ``step`` when groups of the next steps are made by older ones."""
    first_group: int = 0
    """Smallest group id without a fate: where it goes on in the stream of prompts."""
    decided: frozenset[int] = frozenset()
    """Groups above ``first_group`` that the parent had decided; none in bitwise mode."""

    @property
    def stream_position(self) -> int:
        """Smallest group id above which (itself included) no group had a fate."""
        return max(self.first_group, max(self.decided, default=-1) + 1)

    def has_decided(self, group_id: int) -> bool:
        """Did the parent, or one of its own parents, give the group its fate?"""
        return group_id < self.first_group or group_id in self.decided


BEGINNING = Origin()
"""Of a run that is no fork."""


def origin_of(record: RunRecord | None) -> Origin:
    """Where the run of ``record`` begins; without a record, at the starting model."""
    return BEGINNING if record is None or record.forked_from is None else origin_after(record.forked_from)


def origin_after(fork: ForkedFrom) -> Origin:
    """Where a run begins that was forked like this."""
    return Origin(fork.step, fork.first_version, fork.first_group, frozenset(fork.decided))
