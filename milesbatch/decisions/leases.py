"""Who works on which prompt groups: a table of leases over blocks of consecutive groups.

A block is ``groups_per_lease`` consecutive groups; it is handed out, decoded, written and committed as one. Blocks move

    free -> leased -> done            and back from leased to free when the lease ends (expiry, lost worker).

The table is memory only: after a restart it is rebuilt from what was found on disk. A lease that ended may still be
worked on by a slow worker; the first commit of a block counts, any later one is refused (and its file quarantined).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class CommitAnswer(Enum):
    """What the controller says to a worker that finished a block."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Another commit of the block came first; this file does not count."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a block until ``expires_at_s`` (the controller's monotonic clock)."""

    lease_id: int
    block: int
    worker: str
    expires_at_s: float


class LeaseTable:
    """Leases over blocks. ``block b`` = groups ``[b * size, (b + 1) * size)``."""

    def __init__(self, block_size: int, first_block: int = 0) -> None:
        """Blocks below ``first_block`` are done: they are none of this run's."""
        self.block_size = block_size
        self._leased: dict[int, Lease] = {}
        self._done: set[int] = set()
        self._next_id = 1
        self._frontier = first_block

    def groups(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def block_of(self, group_id: int) -> int:
        return group_id // self.block_size

    def mark_done(self, blocks: Iterable[int]) -> None:
        """Blocks found finished on disk after a restart."""
        self._done.update(blocks)
        self._advance()

    def is_done(self, block: int) -> bool:
        return block < self._frontier or block in self._done

    def take(
        self, worker: str, now_s: float, duration_s: float, may_start: Callable[[int], bool], end: int | None = None
    ) -> Lease | None:
        """Lease the first free block below ``end`` for which ``may_start(block)`` holds, in order; None when there is none.

        Blocks are handed out in order, so the first that may not start ends the search.
        """
        block = self._frontier
        while self.is_done(block) or block in self._leased:
            block += 1
        if (end is not None and block >= end) or not may_start(block):
            return None
        lease = Lease(self._next_id, block, worker, now_s + duration_s)
        self._next_id += 1
        self._leased[block] = lease
        return lease

    def commit(self, block: int) -> CommitAnswer:
        """A worker has durably written a block, under a current lease or an ended one: the first one counts."""
        if self.is_done(block):
            return CommitAnswer.DUPLICATE
        self._leased.pop(block, None)
        self._done.add(block)
        self._advance()
        return CommitAnswer.ACCEPTED

    def end_worker(self, worker: str) -> list[int]:
        """Free every block that a lost worker held; returns them."""
        return self._end(lambda lease: lease.worker == worker)

    def expire(self, now_s: float) -> list[int]:
        """Free every block whose lease has run out; returns them."""
        return self._end(lambda lease: lease.expires_at_s <= now_s)

    def held_by(self, worker: str) -> list[int]:
        return sorted(lease.block for lease in self._leased.values() if lease.worker == worker)

    @property
    def num_leases(self) -> int:
        return len(self._leased)

    @property
    def num_leased_groups(self) -> int:
        return len(self._leased) * self.block_size

    def _end(self, ends: Callable[[Lease], bool]) -> list[int]:
        blocks = sorted(block for block, lease in self._leased.items() if ends(lease))
        for block in blocks:
            del self._leased[block]
        return blocks

    def _advance(self) -> None:
        while self._frontier in self._done:
            self._done.discard(self._frontier)
            self._frontier += 1
