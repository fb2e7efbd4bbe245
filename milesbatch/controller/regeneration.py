"""Groups that were trained on and whose trajectory file is lost: generated again, in bitwise mode, for a replay.

They already have their fate, so they are kept apart from the leases of new groups. Memory only, like all of the hub's state:
a trainer that was restarted asks again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from milesbatch.records import GroupRef


class Regeneration:
    """Blocks to be generated again, who works on each, and what has come back."""

    def __init__(self) -> None:
        self._open: dict[int, str | None] = {}
        """Block -> the worker that generates it, or None while nobody does."""
        self._done: dict[int, GroupRef] = {}

    def want(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._open.setdefault(block, None)

    def take(self, worker: str, holding: Collection[int]) -> int | None:
        """A block for ``worker``; one that it has without knowing (the reply was lost) comes first."""
        for block, holder in sorted(self._open.items()):
            if holder is None or (holder == worker and block not in holding):
                self._open[block] = worker
                return block
        return None

    def end_worker(self, worker: str) -> None:
        """Somebody else must take what a lost worker held."""
        for block, holder in self._open.items():
            if holder == worker:
                self._open[block] = None

    def commit(self, block: int, groups: Iterable[GroupRef]) -> bool:
        """A worker has written a block again; False when it was not wanted (any more)."""
        if block not in self._open:
            return False
        del self._open[block]
        self._done.update({group.group_id: group for group in groups})
        return True

    def found(self, group_ids: Iterable[int]) -> tuple[GroupRef, ...] | None:
        """The groups, once all of them are there."""
        wanted = tuple(group_ids)
        if any(group_id not in self._done for group_id in wanted):
            return None
        return tuple(self._done[group_id] for group_id in wanted)
