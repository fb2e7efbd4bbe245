"""What a run may delete: which checkpoints go, and up to which policy version the payload may go. Pure.

Checkpoints: the newest ``keep`` stay, and each whose step is a multiple of ``keep_every``, and the one that a fork began with,
which is its way back as the starting model is that of other runs.

Weights. A start from the oldest of the newest ``keep`` checkpoints, c, may have a lost group of step c + 1 generated again, by
version ``c - staleness`` at the least; workers and readers need what they hold and all that follows. Of all that the
smallest version is *needed*. The *base* is the newest version at or below it with a whole full copy: every version from the
base on can be rebuilt from the base on, so the payload of versions below the base may go, and of no other. Manifests stay. The
page behind it is ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


def checkpoints_to_retire(
    steps: Collection[int], keep: int, keep_every: int | None, origin_step: int = 0
) -> tuple[int, ...]:
    """Steps of the committed checkpoints ``steps`` that go, ascending.

    Raises:
        ValueError: ``keep`` or ``keep_every`` is below 1: then nothing would be sure to stay.
    """
    if keep < 1 or (keep_every is not None and keep_every < 1):
        raise ValueError(f"keep and keep_every must be at least 1, found {keep} and {keep_every}")
    going = (step for step in sorted(steps)[:-keep] if keep_every is None or step % keep_every)
    return tuple(step for step in going if step != origin_step)


@dataclass(frozen=True, slots=True)
class Needs:
    """The smallest policy version that anything could still need, and the checkpoint and staleness that bound it."""

    version: int
    checkpoint: int
    staleness: int


def needed_versions(
    checkpoints: Collection[int],
    *,
    keep: int,
    staleness: int,
    workers: int | None,
    readers: Sequence[int] | None,
) -> Needs | None:
    """From which version on everything must stay; None when it is not known, and then nothing may go.

    ``workers`` is the smallest version that a live worker holds or goes on from, None when one is just starting;
    ``readers`` are the versions that readers hold, None when a hold cannot be understood. With fewer than ``keep``
    checkpoints the starting model stands in for those that are missing, and nothing may go.
    """
    newest = sorted(checkpoints)[-keep:]
    if workers is None or readers is None or len(newest) < keep:
        return None
    return Needs(min(newest[0] - 1 - staleness, workers, *readers), newest[0], staleness)


def find_base(needed: int, oldest: int, is_whole_keyframe: Callable[[int], bool]) -> int | None:
    """The newest version at or below ``needed`` with a whole full copy; None when there is none above ``oldest``.

    ``oldest`` is the oldest version whose payload is still there: when that is the base, there is nothing to delete, so it
    is not looked at.
    """
    return next((version for version in range(needed, oldest, -1) if is_whole_keyframe(version)), None)


def versions_to_retire(base: int, retired: Collection[int]) -> tuple[int, ...]:
    """Versions whose payload may go and has not, ascending: in that order, what is left always ends with a whole chain."""
    return tuple(version for version in range(base) if version not in retired)
