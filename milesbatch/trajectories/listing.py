"""What lies in a run's ``trajectories/``: one row for each file, and where a group is.

Owns: looking, with damaged files reported beside the rest. Never: changes anything, or decides a fate (batch records
do). Invariant: one damaged file costs its own rows only. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milesbatch.decisions.fates import Fate
from milesbatch.errors import InputError, MilesbatchError
from milesbatch.records import BatchRecord
from milesbatch.store.durable import read_optional, storage_error
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.reader import iterate_files, read_table, read_trajectories
from milesbatch.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class FileRow:
    """One trajectory file."""

    path: str
    groups: int
    trajectories: int
    bytes: int
    incarnation: int
    worker: str
    versions: tuple[int, ...]
    """Policy versions that wrote its tokens, ascending."""
    group_ids: tuple[int, ...]
    failed: int
    """Trajectories whose episode ended with an error."""


@dataclass(frozen=True, slots=True)
class Located:
    """The trajectories of a group, the file they are in, and what became of the group."""

    group_id: int
    path: Path
    fate: Fate | None
    """None while no batch record names the group."""
    trajectories: tuple[Trajectory, ...]
    others: tuple[Path, ...]
    """Further files that may hold the group too, from other incarnations or leases; they do not count."""


def list_files(layout: RunLayout) -> tuple[list[FileRow], list[MilesbatchError]]:
    """Every readable file as a row, and an error for each that is not."""
    rows, errors = [], []
    for path in iterate_files(layout):
        try:
            rows.append(_row(path))
        except MilesbatchError as error:
            errors.append(error)
    return rows, errors


def read_batches(layout: RunLayout) -> tuple[list[BatchRecord], list[MilesbatchError]]:
    """Every readable batch record in the order of steps, and an error for each that is not."""
    records, errors = [], []
    try:
        paths = sorted(layout.batches.glob("[0-9]*.json"), key=lambda path: (len(path.name), path.name))
    except OSError as error:
        raise storage_error(layout.batches, error) from error
    for path in paths:
        try:
            records.append(BatchRecord.from_bytes(read_optional(path) or b"", str(path)))
        except MilesbatchError as error:
            errors.append(error)
    return records, errors


def find_group(
    layout: RunLayout, group_id: int, records: Sequence[BatchRecord]
) -> tuple[Located, list[MilesbatchError]]:
    """The group's trajectories: from the file that its batch record names, else from the newest file that has it.

    Raises:
        InputError: no readable file holds the group.
        CorruptArtefactError: the file that the batch record names is damaged.
    """
    candidates = [path for path in iterate_files(layout) if _may_hold(path, group_id)]
    named = _named(layout, group_id, records)
    if named is not None:
        path, digest, fate = named
        found = tuple(read_trajectories(path, [group_id], digest))
        return Located(group_id, path, fate, found, tuple(c for c in candidates if c != path)), []
    errors: list[MilesbatchError] = []
    for path in sorted(candidates, key=lambda c: TrajectoryName.parse(c.name).incarnation, reverse=True):
        try:
            found = tuple(t for t in read_trajectories(path) if t.group_id == group_id)
        except MilesbatchError as error:
            errors.append(error)
            continue
        if found:
            return Located(group_id, path, None, found, tuple(c for c in candidates if c != path)), errors
    causes = "".join(f"\n  {error.what}" for error in errors)
    raise InputError(
        f"{layout.root} has no readable trajectories of group {group_id}{causes}",
        mend="`milesbatch traj ls` shows which groups there are",
    )


def _named(layout: RunLayout, group_id: int, records: Sequence[BatchRecord]) -> tuple[Path, str, Fate] | None:
    for record in records:
        for group in record.trained:
            if group.group_id == group_id:
                return layout.trajectory(group.path), group.digest, Fate(record.step)
        for rejection in record.rejected:
            if rejection.group_id == group_id:
                return layout.trajectory(rejection.path), rejection.digest, Fate(record.step, rejection.reason)
    return None


def _may_hold(path: Path, group_id: int) -> bool:
    name = TrajectoryName.parse(path.name)
    return name.first_group <= group_id <= name.last_group


def _row(path: Path) -> FileRow:
    table = read_table(path).select(["group_id", "versions", "error"])
    name = TrajectoryName.parse(path.name)
    groups = sorted(set(table["group_id"].to_pylist()))
    versions = {span["version"] for spans in table["versions"].to_pylist() for span in spans}
    return FileRow(
        path=str(path),
        groups=len(groups),
        trajectories=table.num_rows,
        bytes=path.stat().st_size,
        incarnation=name.incarnation,
        worker=name.worker,
        versions=tuple(sorted(versions)),
        group_ids=tuple(groups),
        failed=table.num_rows - table["error"].null_count,
    )
