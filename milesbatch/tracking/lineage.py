"""What a tracker is told of a fork: which run, and which of its steps, it began with. Pure.

The parent's curve is not copied: steps go on counting, so the two curves, laid over each other, are one that has a seam at that
step, and no figure is counted twice. The page behind it is ``docs/forks.md``.
"""

from __future__ import annotations

from milesbatch.records import RunRecord

PARENT = "milesbatch.parent_run_id"


def lineage_of(record: RunRecord) -> dict[str, str]:
    """Name and value of each tag; empty when the run is no fork."""
    fork = record.forked_from
    if fork is None:
        return {}
    return {PARENT: fork.run_id, "milesbatch.parent_step": str(fork.step), "milesbatch.parent_path": fork.path}
