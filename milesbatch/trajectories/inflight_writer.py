"""Commit what is begun of a block as one file in ``inflight/``, so that the next incarnation can go on with it.

Owns: the order of rows and the file's name. Never: when to save, or what becomes of a file. Invariant: a committed file is
whole, its name carries its digest, and it holds samples of the groups that its name says. The page behind it is
``docs/format-inflight.md``.

Nothing that counts depends on these files: a group's fate comes from trajectories and batch records alone, and a block whose
file is not there is generated from the start. So the crash states are mild, and no seal names the files:

* killed while the file is written: ``.tmp-*``, which the next take-over sweeps; the block is generated from the start;
* killed between the commit and the deletion of an earlier file of the same block, which it continues: both are there, and the
  newer one, by its incarnation, is tried first;
* killed after the block's trajectories were committed, before the file was deleted: the next take-over deletes it, because
  the block's groups are decided or ready;
* killed at any moment after the file was read: it is still there, and used again;
* a zombie that slips through the fence: the living incarnation does not see the file, for only files that were there at its
  take-over are named in leases; a later one may use it, as the samples of published weights that it proves to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from milesbatch.records import FileRef
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.inflight_schema import BegunSample, InflightMetadata, to_table
from milesbatch.trajectories.writer import commit_table


def write_inflight(
    layout: RunLayout,
    samples: Sequence[BegunSample],
    *,
    groups: Sequence[int],
    incarnation: int,
    worker: str,
    metadata: InflightMetadata,
    before_commit: Callable[[], None],
) -> tuple[TrajectoryName, FileRef]:
    """Commit ``samples`` of the block ``groups`` as one Arrow IPC file; return its name and reference.

    ``before_commit`` is the fencing check. Samples without a token are left out by the caller.

    Durability: on return the file is durable and visible.

    Raises:
        ValueError: a sample is inconsistent, of another block, or there twice; or there is none.
        StorageError: nothing was committed.
    """
    ordered = sorted(samples, key=lambda sample: (sample.group_id, sample.sample_index))
    keys = [(sample.group_id, sample.sample_index) for sample in ordered]
    if not keys or len(set(keys)) != len(keys) or not {group for group, _ in keys} <= set(groups):
        raise ValueError(f"samples {keys} are not samples of groups {list(groups)}, each once")
    for sample in ordered:
        sample.validate()
    span = min(groups), max(groups)
    return commit_table(layout.inflight, to_table(ordered, metadata), span, incarnation, worker, before_commit)
