"""What the publishers of several ranks say to each other while they write one version: small values, never weights.

Owns the port and the team of one; how ranks really talk is the trainer's. Invariant: every rank makes the same calls in the
same order, so each call is a meeting, too: what a rank did before it is done when it returns on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Team(Protocol):
    """The ranks that write a version together; each writes its share."""

    @property
    def rank(self) -> int:
        """0 is the one that commits."""

    def all_of(self, value: T) -> list[T]:
        """Every rank's value, by rank, on all ranks (collective)."""


class Alone:
    """A team of one."""

    rank = 0

    def all_of(self, value: T) -> list[T]:
        return [value]


def from_first(team: Team, action: Callable[[], T]) -> T:
    """What ``action`` gives on rank 0, on all ranks (collective). When it raises there, the others wait for that rank's end."""
    value = action() if team.rank == 0 else None
    return team.all_of(value)[0]  # type: ignore[return-value]
