"""What lies in a run's ``trajectories/``: one row for each file, with the fates of its groups, and where a group is.

Owns looking, with damaged files reported beside the rest. Never changes anything, or decides what counts. Invariant:
one damaged file costs its own row only. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milesbatch.analysis.counted import PENDING, Counted
from milesbatch.analysis.files import parse_columns, read_bytes
from milesbatch.analysis.history import NO_REASON
from milesbatch.decisions.fates import Fate
from milesbatch.errors import CorruptArtefactError, InputError, MilesbatchError
from milesbatch.store.durable import storage_error
from milesbatch.store.layout import TrajectoryName
from milesbatch.trajectories.reader import iterate_files, read_trajectories
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
    trained: int
    """Groups, as those of ``rejected`` and ``pending``."""
    rejected: int
    pending: int
    steps: tuple[int, ...]
    """Train steps whose batch records name it, ascending."""
    uncounted: str | None
    """Why nothing in it counts; null when something does."""


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


def list_files(counted: Counted, *, verify: bool = False) -> tuple[list[FileRow], list[MilesbatchError]]:
    """Every readable file as a row, and an error for each that is not."""
    rows: list[FileRow] = []
    errors = {error.what: error for error in counted.errors}
    starts, positions = _by_file(counted)
    numbers = {name: number for number, name in enumerate(counted.files)}
    listed = [path.name for path in iterate_files(counted.layout)]
    for name in [*listed, *sorted(set(counted.files) - set(listed))]:
        number = numbers.get(name)
        held = positions[starts[number] : starts[number + 1]] if number is not None else positions[:0]
        try:
            rows.append(_row(counted, name, held, verify))
        except (FileNotFoundError, ValueError):  # ValueError: a batch record names what is not even the name of one
            if (counted.step[held] != PENDING).any():
                error = CorruptArtefactError(
                    f"{counted.layout.trajectory(name)} is missing", mend="run `milesbatch audit`"
                )
                errors.setdefault(error.what, error)
        except MilesbatchError as error:
            errors.setdefault(error.what, error)
    return rows, list(errors.values())


def _by_file(counted: Counted) -> tuple[Any, Any]:
    """Positions of groups sorted by file, and where each file's begin."""
    positions = np.argsort(counted.file, kind="stable")
    starts = np.searchsorted(counted.file[positions], np.arange(len(counted.files) + 1))
    return starts, positions


def _row(counted: Counted, text: str, held: Any, verify: bool) -> FileRow:
    path, name = counted.layout.trajectory(text), TrajectoryName.parse(text)
    data = read_bytes(path, verify=verify)
    table = parse_columns(path, data, ("group_id", "versions", "error"))
    groups = np.unique(table["group_id"].to_numpy()).tolist()
    spans = table["versions"].chunk(0) if table["versions"].num_chunks == 1 else table["versions"].combine_chunks()
    versions = np.unique(spans.flatten().field(1).to_numpy()).tolist()
    is_open, is_rejected = counted.step[held] == PENDING, counted.reason[held] != NO_REASON
    steps = np.unique(counted.step[held][~is_open]).tolist()
    return FileRow(
        path=str(path),
        groups=len(groups),
        trajectories=table.num_rows,
        bytes=_size(path) if data is None else len(data),
        incarnation=name.incarnation,
        worker=name.worker,
        versions=tuple(versions),
        group_ids=tuple(groups),
        failed=table.num_rows - table["error"].null_count,
        trained=int((~is_open & ~is_rejected).sum()),
        rejected=int(is_rejected.sum()),
        pending=int(is_open.sum()),
        steps=tuple(steps),
        uncounted=None if len(held) else counted.uncounted.get(text, "batch records name other files for its groups"),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise storage_error(path, error) from error


def find_group(counted: Counted, group_id: int) -> Located:
    """The group's trajectories, from the file in which it counts, which is verified.

    Raises:
        InputError: the group counts nowhere.
        CorruptArtefactError: its file is damaged.
    """
    position = int(counted.positions(np.array([group_id]))[0])
    holders = [path for path in iterate_files(counted.layout) if _may_hold(path, group_id)]
    if position < 0:
        where = "".join(f"\n  {path}: {counted.uncounted.get(path.name, 'it does not count')}" for path in holders)
        raise InputError(
            f"{counted.layout.root} has no readable trajectories of group {group_id} that count{where}",
            mend="`milesbatch traj ls` shows which groups there are",
        )
    path = counted.path(int(counted.file[position]))
    found = tuple(read_trajectories(path, [group_id]))
    return Located(group_id, path, counted.fate(position), found, tuple(p for p in holders if p != path))


def read_samples(counted: Counted, keys: Sequence[tuple[int, int]]) -> list[tuple[Trajectory, Fate | None]]:
    """Samples (group, index), in the order of ``keys``, with the fates of their groups; each file is read once.

    Raises:
        InputError: one of them does not count.
        CorruptArtefactError: a file is damaged, or does not hold the sample.
    """
    positions = counted.positions(np.array([group for group, _ in keys], np.int64)).tolist()
    by_file: dict[int, set[int]] = {}
    for (group, index), position in zip(keys, positions, strict=True):
        if position < 0:
            raise InputError(
                f"group {group}, sample {index} does not count", mend="`milesbatch traj ls` shows what there is"
            )
        by_file.setdefault(int(counted.file[position]), set()).add(group)
    found = {
        (one.group_id, one.sample_index): one
        for number, groups in by_file.items()
        for one in read_trajectories(counted.path(number), groups)
    }
    for (group, index), position in zip(keys, positions, strict=True):
        if (group, index) not in found:
            path = counted.path(int(counted.file[position]))
            raise CorruptArtefactError(
                f"{path} holds no sample {index} of group {group}", mend="run `milesbatch audit`"
            )
    return [(found[key], counted.fate(position)) for key, position in zip(keys, positions, strict=True)]


def _may_hold(path: Path, group_id: int) -> bool:
    name = TrajectoryName.parse(path.name)
    return name.first_group <= group_id <= name.last_group
