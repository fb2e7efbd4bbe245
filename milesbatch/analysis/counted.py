"""Which trajectories of a run count, and what became of them: one entry for each group, one file for each group.

Owns the answer for all analysis; it is that of a take-over (``store/survey.py``) and of the audit, reached without
reading the files of groups that have a fate. Never changes anything. Invariant: a group is counted in exactly one
file: the one that its batch record names, or, while it has no fate, the first one that every later seal accepts. The
page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from milesbatch.analysis.files import read_columns
from milesbatch.analysis.history import NO_REASON, REASONS, UNKNOWN_VERSION, History, Ints, Step, read_history
from milesbatch.decisions.fates import Fate
from milesbatch.errors import CorruptArtefactError, MilesbatchError
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.reader import iterate_files

PENDING = 0
"""Instead of a step, for groups without a fate."""
FATES = ("pending", "trained", "rejected")


@dataclass(slots=True)
class Counted:
    """The groups that count, ascending by id, as columns; and the files that do not count."""

    layout: RunLayout
    files: list[str]
    """Names of the files that hold counted groups."""
    group_id: Ints
    file: NDArray[np.int32]
    """Index into ``files``."""
    step: Ints
    """``PENDING`` where the group has no fate."""
    reason: NDArray[np.int8]
    """Index into ``REASONS``; ``NO_REASON`` unless rejected."""
    samples: Ints
    """As the batch record states it; 0 where none does."""
    version_min: Ints
    version_max: Ints
    steps: list[Step]
    uncounted: dict[str, str] = field(default_factory=dict)
    """Name of a file that does not count -> why."""
    errors: list[MilesbatchError] = field(default_factory=list)
    """What could not be read on the way here."""

    @property
    def last_step(self) -> int:
        return max((step.step for step in self.steps), default=0)

    @property
    def fate_code(self) -> NDArray[np.int8]:
        """Index into ``FATES`` for each group."""
        codes = np.where(self.reason != NO_REASON, 2, np.where(self.step == PENDING, 0, 1))
        return codes.astype(np.int8)

    def positions(self, group_ids: Ints) -> Ints:
        """Where each of ``group_ids`` is in the columns; -1 where it is not counted."""
        if not len(self.group_id):
            return np.full(len(group_ids), -1, np.int64)
        found = np.minimum(np.searchsorted(self.group_id, group_ids), len(self.group_id) - 1)
        return np.where(self.group_id[found] == group_ids, found, -1)

    def fate(self, position: int) -> Fate | None:
        """Fate of the group at ``position``; None while it has none."""
        step, reason = int(self.step[position]), int(self.reason[position])
        if step == PENDING:
            return None
        return Fate(step, None if reason == NO_REASON else REASONS[reason])

    def files_of(self, chosen: NDArray[np.bool_]) -> list[int]:
        """Files of the groups that are true in ``chosen``, ascending."""
        return [int(number) for number in np.unique(self.file[chosen])]

    def path(self, file: int) -> Path:
        return self.layout.trajectory(self.files[file])

    def file_table(self) -> Any:
        """The trajectory files by name as a ``pyarrow.Table``: who wrote each, and why it does not count, if so."""
        texts = [*self.files, *self.uncounted]
        names = [_parsed(text) for text in texts]
        return pa.table(
            {
                "file": pa.array(texts, pa.string()),
                "first_group": pa.array([name and name.first_group for name in names], pa.int64()),
                "last_group": pa.array([name and name.last_group for name in names], pa.int64()),
                "incarnation": pa.array([name and name.incarnation for name in names], pa.int64()),
                "worker": pa.array([name and name.worker for name in names], pa.string()),
                "uncounted": pa.array([None] * len(self.files) + list(self.uncounted.values()), pa.string()),
            }
        )

    def table(self) -> Any:
        """The groups as a ``pyarrow.Table``; the columns are described in ``docs/trajectories.md``."""
        names = pa.array(self.files, pa.string())
        step = pa.array(self.step, mask=self.step == PENDING)
        known = self.version_min >= 0
        stale = known & (self.step != PENDING)
        return pa.table(
            {
                "group_id": pa.array(self.group_id),
                "fate": pa.array(FATES, pa.string()).take(pa.array(self.fate_code)),
                "reason": pa.array(REASONS, pa.string()).take(pa.array(self.reason, mask=self.reason == NO_REASON)),
                "step": step,
                "file": names.take(pa.array(self.file)),
                "samples": pa.array(self.samples, mask=self.samples == 0),
                "version_min": pa.array(self.version_min, mask=~known),
                "version_max": pa.array(self.version_max, mask=~known),
                "staleness": pa.array(self.step - 1 - self.version_min, mask=~stale),
            }
        )


def count_groups(layout: RunLayout) -> Counted:
    """Find what counts in a run, while it is going or afterwards, from its directory or a copy of that.

    Raises:
        StorageError: a directory cannot be listed.
        FormatVersionError: written by a newer version of the project.
    """
    history = read_history(layout)
    names = {path.name: TrajectoryName.parse(path.name) for path in iterate_files(layout)}
    building = _Building(layout, history, names)
    building.replace_lost()
    building.take_pending()
    return building.counted()


@dataclass(slots=True)
class _Building:
    layout: RunLayout
    history: History
    names: dict[str, TrajectoryName]
    homes: dict[str, int] = field(default_factory=dict)
    """File names that are referred to -> number; those of the records come first, in their order."""
    file: NDArray[np.int32] = field(default_factory=lambda: np.array([], np.int32))
    pending: dict[int, int] = field(default_factory=dict)
    """Group without a fate -> number of its file."""
    uncounted: dict[str, str] = field(default_factory=dict)
    errors: list[MilesbatchError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.homes = {name: number for number, name in enumerate(self.history.paths)}
        self.file = self.history.file.copy()
        self.errors = list(self.history.errors)

    def replace_lost(self) -> None:
        """Groups whose file is gone are counted in another one that proves the same content."""
        gone = [
            number
            for number, name in enumerate(self.history.paths)
            if name not in self.names and not self.layout.trajectory(name).exists()
        ]
        for position in np.flatnonzero(np.isin(self.file, gone)).tolist():
            other = self._same_content(int(self.history.group_id[position]), self.history.content[position].decode())
            if other is not None:
                self.file[position] = self.homes.setdefault(other, len(self.homes))

    def _same_content(self, group: int, content: str) -> str | None:
        for text, name in self.names.items():
            if not content or not name.first_group <= group <= name.last_group:
                continue
            try:
                refs = group_refs(self.layout.trajectory(text))
            except CorruptArtefactError:
                continue
            if any((ref.group_id, ref.content) == (group, content) for ref in refs):
                return text
        return None

    def take_pending(self) -> None:
        """Files that wait for training, in the order in which a take-over meets them."""
        blocks: set[int] = set()
        for text, name in sorted(self.names.items()):
            groups = range(name.first_group, name.last_group + 1)
            is_consumed = text in self.homes
            if is_consumed and self._decided(name) == len(groups):
                continue
            reason = None if is_consumed else self._why_not(text, name, blocks)
            if reason is None:
                reason = self._take(text)
            if reason is None:
                blocks.update(groups)
            elif not is_consumed:
                self.uncounted[text] = reason

    def _decided(self, name: TrajectoryName) -> int:
        """How many groups of the range of a file have a fate."""
        low, high = np.searchsorted(self.history.group_id, [name.first_group, name.last_group + 1])
        before = sum(map(self.history.origin.has_decided, range(name.first_group, name.last_group + 1)))
        return int(high - low) + before

    def _why_not(self, text: str, name: TrajectoryName, blocks: set[int]) -> str | None:
        if not self.history.seals.accept_trajectories(name):
            return f"a later incarnation did not accept what incarnation {name.incarnation} wrote here"
        position = int(np.searchsorted(self.history.group_id, name.first_group))
        ids = self.history.group_id
        has_fate = position < len(ids) and int(ids[position]) == name.first_group
        if has_fate:
            home = self.history.paths[int(self.history.file[position])]
            if home in self.names or self.layout.trajectory(home).exists():
                return "another file holds the same groups"
        if not blocks.isdisjoint(range(name.first_group, name.last_group + 1)):
            return "another file holds the same groups"
        return None

    def _take(self, text: str) -> str | None:
        """Count the groups of a file that have no fate; why not, when it is damaged."""
        try:
            table = read_columns(self.layout.trajectory(text), ["group_id"], verify=True)
        except FileNotFoundError:
            return "it was moved away"
        except MilesbatchError as error:
            self.errors.append(error)
            return "damaged"
        for group in np.setdiff1d(table["group_id"].to_numpy(), self.history.group_id).tolist():
            if self.history.origin.has_decided(group):
                continue
            self.pending.setdefault(group, self.homes.setdefault(text, len(self.homes)))
        return None

    def counted(self) -> Counted:
        history, extra = self.history, len(self.pending)
        ids = np.concatenate([history.group_id, np.array([*self.pending], np.int64)])
        order = np.argsort(ids, kind="stable")

        def whole(values: NDArray[Any], filler: int) -> NDArray[Any]:
            return np.concatenate([values, np.full(extra, filler, values.dtype)])[order]

        files = np.concatenate([self.file, np.array([*self.pending.values()], np.int32)])[order]
        used, numbers = np.unique(files, return_inverse=True)
        names = list(self.homes)
        # In the order of their first groups, so that a scan goes through the run in the order of its groups.
        by_name = sorted(range(len(used)), key=lambda n: names[used[n]])
        rank = np.empty(len(used), np.int32)
        rank[by_name] = np.arange(len(used), dtype=np.int32)
        return Counted(
            layout=self.layout,
            files=[names[used[n]] for n in by_name],
            group_id=ids[order],
            file=rank[numbers] if len(used) else np.array([], np.int32),
            step=whole(history.step, PENDING),
            reason=whole(history.reason, NO_REASON),
            samples=whole(history.samples, 0),
            version_min=whole(history.version_min, UNKNOWN_VERSION),
            version_max=whole(history.version_max, UNKNOWN_VERSION),
            steps=history.steps,
            uncounted=self.uncounted,
            errors=self.errors,
        )


def _parsed(text: str) -> TrajectoryName | None:
    try:
        return TrajectoryName.parse(text)
    except ValueError:  # a batch record names it; that there is no such file is said where it is read
        return None


def step_table(steps: list[Step]) -> Any:
    """The batch records as a ``pyarrow.Table``."""
    return pa.table(
        {
            "step": pa.array([s.step for s in steps], pa.int64()),
            "incarnation": pa.array([s.incarnation for s in steps], pa.int64()),
            "created_at": pa.array([s.created_at for s in steps], pa.string()).cast(pa.timestamp("us", "UTC")),
            "trained": pa.array([s.trained for s in steps], pa.int64()),
            "rejected": pa.array([s.rejected for s in steps], pa.int64()),
            "stream_position": pa.array([s.stream_position for s in steps], pa.int64()),
        }
    )
