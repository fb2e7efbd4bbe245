"""Which groups a step trains on, and which policy version may make them.

Two modes (``determinism`` in the recipe):

* **bitwise**: step k takes exactly the groups ``[(k-1)*G, k*G)``, all made by exactly version ``max(0, k-1-staleness)``. The
  content of a step is then a pure function of the recipe, whatever died and whenever. A fork counts from its origin: see
  :mod:`milesbatch.decisions.origin`.
* **relaxed**: step k takes the first G acceptable groups in the order of their ids; a group whose oldest token is more than
  ``staleness`` versions behind is rejected as stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.records import GroupRef, Rejection


@dataclass(frozen=True, slots=True)
class BatchRule:
    """What decides on batches: groups per step (G), allowed staleness in versions, the mode, and where the run begins."""

    groups_per_step: int
    staleness: int
    bitwise: bool
    origin: Origin = BEGINNING

    def step_of_group(self, group_id: int) -> int:
        """Step that a group belongs to in bitwise mode."""
        return (group_id - self.origin.first_group) // self.groups_per_step + self.origin.step + 1

    def groups_of_step(self, step: int) -> range:
        """Groups of a step in bitwise mode."""
        first = self.origin.first_group + (step - 1 - self.origin.step) * self.groups_per_step
        return range(first, first + self.groups_per_step)

    def version_for(self, group_id: int) -> int:
        """The one version that may make this group in bitwise mode."""
        return max(self.origin.first_version, self.step_of_group(group_id) - 1 - self.staleness)

    def oldest_for(self, step: int) -> int:
        """Oldest policy version that may have drawn a token of ``step``, in relaxed mode."""
        return step - 1 - self.staleness

    def is_stale(self, group: GroupRef, step: int) -> bool:
        """Is the group's oldest token too old for ``step``? Never in bitwise mode, where the version is fixed."""
        return not self.bitwise and group.version_min < self.oldest_for(step)

    def may_start(self, group_id: int, *, published: int, steps_left: int, waiting: int) -> bool:
        """May work on this group start, given the newest published version, the steps that are not recorded yet, and how
        many groups have been handed out or finished but have no fate yet?

        In relaxed mode at most (staleness + 1) steps' worth of groups may be under way (rounded up to whole leases), so that
        none becomes stale only because it waited; this holds after a restart as well, because ``waiting`` counts what was
        found on disk. Groups that are stale for the next step must not be counted: near the end of a run they would take
        the places of those that the last steps wait for.
        """
        if self.bitwise:
            return self.version_for(group_id) <= published
        return published >= 0 and waiting < min(self.staleness + 1, steps_left) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """What a step trains on, and what it rejects."""

    trained: tuple[GroupRef, ...]
    rejected: tuple[Rejection, ...]


def choose_batch(rule: BatchRule, step: int, ready: Mapping[int, GroupRef]) -> BatchChoice | None:
    """Choose the groups of ``step`` among the finished ones without a fate; None when there are not enough yet.

    ``step`` trains version ``step - 1`` into ``step``.
    """
    if rule.bitwise:
        wanted = rule.groups_of_step(step)
        if any(group_id not in ready for group_id in wanted):
            return None
        return BatchChoice(tuple(ready[group_id] for group_id in wanted), ())
    fresh = [ready[g] for g in sorted(ready) if not rule.is_stale(ready[g], step)]
    if len(fresh) < rule.groups_per_step:
        return None
    trained = fresh[: rule.groups_per_step]
    stale = [ready[g] for g in sorted(ready) if rule.is_stale(ready[g], step)]
    return BatchChoice(
        tuple(trained),
        tuple(Rejection(group_id=g.group_id, reason="stale", path=g.path, digest=g.digest) for g in stale),
    )


def missing_groups(rule: BatchRule, step: int, ready: Mapping[int, GroupRef]) -> Sequence[int]:
    """Groups that a bitwise step still waits for."""
    return [group_id for group_id in rule.groups_of_step(step) if group_id not in ready] if rule.bitwise else []
