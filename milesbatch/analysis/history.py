"""The batch records of a run as columns: which group has which fate, by which file.

Owns reading the records of a run of any length in little time and memory: no Python object stays for a group. Never
decides what counts (the seals do, by :class:`milesbatch.store.survey.Seals`). Invariant: a record is used only when
its bytes are what its digest says; one that is damaged, missing or fenced out costs itself only. The page behind it is
``docs/trajectories.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from milesbatch import FORMAT_VERSION
from milesbatch.decisions.origin import BEGINNING, Origin
from milesbatch.errors import CorruptArtefactError, MilesbatchError
from milesbatch.records import BatchRecord, GroupRef, IncarnationRecord, Rejection, digest_bytes
from milesbatch.store.durable import read_optional
from milesbatch.store.entries import numbered
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_origin
from milesbatch.store.survey import Seals

Ints = NDArray[np.int64]
REASONS: tuple[str, ...] = get_args(Rejection.model_fields["reason"].annotation)
NO_REASON = -1
UNKNOWN_VERSION = -2
"""Batch records state the versions of trained groups only."""
NO_VERSION = -1
"""As batch records write it: no sample of the group has a token of the policy."""

_DIGEST_LINE = re.compile(rb'^ "record_digest": "(?P<digest>xxh128:[0-9a-f]{32})",\n', re.MULTILINE)
_MEND = "run `milesbatch audit` on the run"


@dataclass(frozen=True, slots=True)
class Step:
    """One batch record that counts."""

    step: int
    incarnation: int
    created_at: str
    trained: int
    """Groups."""
    rejected: int
    stream_position: int


@dataclass(slots=True)
class History:
    """What the batch records say, by column; one entry for each group that has a fate, ascending by group."""

    group_id: Ints
    step: Ints
    reason: NDArray[np.int8]
    """Index into ``REASONS``; ``NO_REASON`` when the group was trained."""
    file: NDArray[np.int32]
    """Index into ``paths``."""
    samples: Ints
    """As the record states it; 0 for rejected groups."""
    version_min: Ints
    version_max: Ints
    content: NDArray[np.bytes_]
    """Digest of what training took from the group; empty for rejected groups."""
    paths: list[str]
    """File names that records give."""
    digests: list[str]
    """Digest of each of ``paths``."""
    steps: list[Step]
    seals: Seals
    errors: list[MilesbatchError] = field(default_factory=list)
    origin: Origin = BEGINNING
    """Where the run begins: of a fork, the records before are its parent's."""

    @property
    def last_step(self) -> int:
        return max((step.step for step in self.steps), default=0)


def read_history(layout: RunLayout) -> History:
    """Read every incarnation record and batch record that counts; what cannot be read is in ``errors``.

    Raises:
        StorageError: a directory cannot be listed.
        FormatVersionError: written by a newer version of the project.
    """
    errors: list[MilesbatchError] = []
    lives = list(_incarnations(layout, errors))
    seals = Seals(lives)
    columns = _Columns()
    steps = []
    origin = _origin(layout, errors)
    for record in _records(layout, seals, origin, lives[-1].seal.last_batch if lives else 0, errors):
        columns.add(record)
        counts = (len(record.trained), len(record.rejected))
        steps.append(Step(record.step, record.incarnation, record.created_at, *counts, record.stream_position))
    return columns.history(steps, seals, origin, errors)


def _origin(layout: RunLayout, errors: list[MilesbatchError]) -> Origin:
    try:
        return read_origin(layout)
    except CorruptArtefactError as error:
        errors.append(error)
        return BEGINNING


def read_batch(path: Path) -> BatchRecord | None:
    """A batch record, verified; None when there is none.

    Raises:
        CorruptArtefactError, FormatVersionError: as :meth:`milesbatch.records.Record.from_bytes`.
    """
    data = read_optional(path)
    if data is None:
        return None
    # The digest covers the text without its own line: this is the check of `from_bytes` without writing the text anew.
    match = _DIGEST_LINE.search(data)
    if match is None or digest_bytes(data[: match.start()] + data[match.end() :]) != match["digest"].decode():
        return BatchRecord.from_bytes(data, str(path))
    body = json.loads(data)
    if body.pop("kind", None) != BatchRecord.kind or body.pop("format", None) != list(FORMAT_VERSION):
        return BatchRecord.from_bytes(data, str(path))
    del body["record_digest"]
    return BatchRecord.model_validate(body)


def _newest(directory: Path) -> int:
    """Largest number that a record in ``directory`` is named by; 0 for none."""
    return max((number for number, _ in numbered(directory, ".json")), default=0)


def _incarnations(layout: RunLayout, errors: list[MilesbatchError]) -> Iterator[IncarnationRecord]:
    """Incarnation records, ascending; the seal of one that is damaged is not known and left out, as an audit does."""
    for number in range(1, _newest(layout.incarnations) + 1):
        path = layout.incarnation(number)
        try:
            data = read_optional(path)
            if data is None:
                raise CorruptArtefactError(f"{path} is missing, but later incarnations exist", mend=_MEND)
            record = IncarnationRecord.from_bytes(data, str(path))
            if record.incarnation != number:
                raise CorruptArtefactError(f"{path} is the record of incarnation {record.incarnation}", mend=_MEND)
        except CorruptArtefactError as error:
            errors.append(error)
            continue
        yield record


def _records(
    layout: RunLayout, seals: Seals, origin: Origin, promised: int, errors: list[MilesbatchError]
) -> Iterator[BatchRecord]:
    """Batch records that count, ascending. A gap is an error when later ones count or a seal says that it was
    filled."""
    gaps: list[tuple[int, CorruptArtefactError]] = []
    for step in range(origin.step + 1, max(_newest(layout.batches), promised) + 1):
        path = layout.batch(step)
        try:
            record = read_batch(path)
            if record is None:
                raise CorruptArtefactError(f"{path} is missing", mend=_MEND, unseen=path)
            if record.step != step:
                raise CorruptArtefactError(f"{path} is the batch record of step {record.step}", mend=_MEND)
        except CorruptArtefactError as error:
            gaps.append((step, error))
            continue
        if not seals.accept_batch(record):
            continue
        errors += [gap for _, gap in gaps]
        gaps = []
        yield record
    # At the end of the list, one that is not there was moved away meanwhile, unless a seal says that it counts.
    errors += [gap for step, gap in gaps if step <= promised or layout.batch(step).exists()]


class _Columns:
    """Collects records into arrays."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._paths: dict[str, int] = {}
        self._digests: list[str] = []

    def add(self, record: BatchRecord) -> None:
        trained, rejected = record.trained, record.rejected
        none = [0] * len(rejected)
        unknown = [UNKNOWN_VERSION] * len(rejected)
        groups: list[GroupRef | Rejection] = [*trained, *rejected]
        self._append("group_id", [group.group_id for group in groups], np.int64)
        self._append("step", [record.step] * len(groups), np.int64)
        reasons = [NO_REASON] * len(trained) + [REASONS.index(group.reason) for group in rejected]
        self._append("reason", reasons, np.int8)
        self._append("file", [self._file(group.path, group.digest) for group in groups], np.int32)
        self._append("samples", [group.samples for group in trained] + none, np.int64)
        self._append("version_min", [group.version_min for group in trained] + unknown, np.int64)
        self._append("version_max", [group.version_max for group in trained] + unknown, np.int64)
        self._append("content", [group.content for group in trained] + [""] * len(rejected), "S39")

    def _append(self, name: str, values: list[Any], dtype: Any) -> None:
        self._parts.setdefault(name, []).append(np.array(values, dtype))

    def _file(self, path: str, digest: str) -> int:
        number = self._paths.setdefault(path, len(self._paths))
        if number == len(self._digests):
            self._digests.append(digest)
        return number

    def history(self, steps: list[Step], seals: Seals, origin: Origin, errors: list[MilesbatchError]) -> History:
        empty: dict[str, Any] = {"reason": np.int8, "file": np.int32, "content": "S39"}
        names = ("group_id", "step", "reason", "file", "samples", "version_min", "version_max", "content")
        whole = {
            name: np.concatenate([np.array([], empty.get(name, np.int64)), *self._parts.get(name, [])])
            for name in names
        }
        # A group that two records name keeps its first fate; that is a violation, which an audit reports.
        _, first = np.unique(whole["group_id"], return_index=True)
        columns: dict[str, Any] = {name: values[first] for name, values in whole.items()}
        return History(
            **columns,
            paths=list(self._paths),
            digests=self._digests,
            steps=steps,
            seals=seals,
            errors=errors,
            origin=origin,
        )
