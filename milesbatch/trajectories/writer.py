"""Commit finished groups as one trajectory file.

Owns: the order of rows, the file's name, and the refusal of anything that is not whole groups. Never: which groups
belong together (the lease says so) or what becomes of them. Invariant: a committed file holds whole groups only,
sorted by group and sample, and its name carries its digest. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from milesbatch.ids import check_digest
from milesbatch.records import FileRef
from milesbatch.store.durable import publishing
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.schema import FileMetadata, to_table
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.trajectories.vocabulary import check_vocabulary, vocabulary_of

TAG_DIGITS = 16


def content_tag(digest: str) -> str:
    """The part of a file's digest that its name carries.

    Raises:
        ValueError: not a digest.
    """
    return check_digest(digest).partition(":")[2][:TAG_DIGITS]


def write_trajectories(
    layout: RunLayout,
    trajectories: Sequence[Trajectory],
    *,
    incarnation: int,
    worker: str,
    metadata: FileMetadata,
    before_commit: Callable[[], None],
    samples_per_group: int | None = None,
) -> tuple[TrajectoryName, FileRef]:
    """Commit ``trajectories`` as one Arrow IPC file and return its name and reference.

    ``before_commit`` is the fencing check; it runs when the data is durable and not yet visible. Every group must be
    there with samples 0 .. n-1, n being ``samples_per_group`` where given and equal for all groups otherwise.

    Durability: on return the file is durable and visible; if killed midway only a ``.tmp-*`` file may be left, which
    the next take-over sweeps.

    Raises:
        ValueError: a trajectory is inconsistent, or has a token that the run's model has not, a group is not whole, or a row
            names another worker or incarnation.
        StorageError: nothing was committed.
    """
    ordered = sorted(trajectories, key=lambda t: (t.group_id, t.sample_index))
    _check_groups(ordered, samples_per_group)
    for trajectory in ordered:
        trajectory.validate()
        if (trajectory.worker, trajectory.incarnation) != (worker, incarnation):
            raise ValueError(
                f"group {trajectory.group_id}, sample {trajectory.sample_index} is of {trajectory.worker}, incarnation "
                f"{trajectory.incarnation}, but {worker} in incarnation {incarnation} writes the file"
            )
    check_vocabulary(ordered, vocabulary_of(layout.model))
    groups = ordered[0].group_id, ordered[-1].group_id
    table = to_table(ordered, metadata)
    return commit_table(layout.trajectories, table, groups, incarnation, worker, before_commit)


def commit_table(
    directory: Path,
    table: Any,
    groups: tuple[int, int],
    incarnation: int,
    worker: str,
    before_commit: Callable[[], None],
) -> tuple[TrajectoryName, FileRef]:
    """Commit a ``pyarrow.Table`` as one Arrow IPC file, named by its first and last group, its writer, and its content.

    Durability: as :func:`write_trajectories`.

    Raises:
        StorageError: nothing was committed.
    """

    def name_of(digest: str) -> TrajectoryName:
        return TrajectoryName(*groups, incarnation, worker, content_tag(digest))

    with publishing(directory, lambda digest: str(name_of(digest)), before_commit, needed_bytes=table.nbytes) as file:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(file.stream, table.schema, options=options) as sink:
            sink.write_table(table)
    assert file.ref is not None
    return name_of(file.ref.digest), file.ref


def _check_groups(ordered: Sequence[Trajectory], samples_per_group: int | None) -> None:
    if not ordered:
        raise ValueError("a trajectory file holds at least one group; there are no trajectories")
    groups: dict[int, list[int]] = defaultdict(list)
    for trajectory in ordered:
        groups[trajectory.group_id].append(trajectory.sample_index)
    size = samples_per_group or max(len(samples) for samples in groups.values())
    for group_id, samples in groups.items():
        if samples != list(range(size)):
            raise ValueError(f"group {group_id} is not whole: it has samples {samples}, expected 0 .. {size - 1}")
