"""What the trajectory files say, from a few columns of each: lag of tokens, failed episodes, and samples to choose from.

Owns: reading those columns. Never: tokens, texts (``samples.py`` reads the chosen few). Invariant: a damaged file costs its
own rows only and is told; about 60 bytes of memory for a trajectory. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch.errors import MilesbatchError
from milesbatch.records import BatchRecord
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.reader import iterate_files

COLUMNS = (
    "group_id", "sample_index", "versions", "reward", "finish_reason", "error", "prompt_tokens", "response_tokens",
)  # fmt: skip
LAGS = 5
"""Lags 0, 1, 2, 3, and 4 with all above it."""
_LONGEST_CAUSE = 160
_MOST_CAUSES = 1000
_MOST_GAPS = 20
_DETAIL = re.compile(r"0x[0-9a-f]+|\d+")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Trajectories of groups with a fate, as columns of equal length."""

    step: Ints
    """The step whose batch record names the group."""
    is_trained: NDArray[np.bool_]
    group: Ints
    sample: Ints
    reward: Floats
    length: Ints
    """Response tokens."""
    is_failed: NDArray[np.bool_]
    is_cut: NDArray[np.bool_]
    """Ended because there was no room for more tokens."""
    file: Ints
    """Index in ``Experience.files``."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(slots=True)
class Experience:
    """Sums over all files, and the rows that have a fate."""

    rows: Rows
    files: list[Path] = field(default_factory=list)
    lag_tokens: dict[int, list[int]] = field(default_factory=dict)
    """Step -> trained response tokens by lag in versions, as ``LAGS`` says."""
    causes: Counter[str] = field(default_factory=Counter)
    """Failed episodes by cause; numbers in it are replaced by ``#``."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    trajectories: int = 0
    tokens: int = 0
    pending: int = 0
    """Trajectories in files whose group has no fate (yet), or has it in another file."""
    gaps: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Fates:
    """File name -> group id -> (step, is trained)."""

    of: dict[str, dict[int, tuple[int, bool]]]

    @classmethod
    def read(cls, batches: Sequence[BatchRecord]) -> _Fates:
        found: dict[str, dict[int, tuple[int, bool]]] = {}
        for record in batches:
            for group in record.trained:
                found.setdefault(group.path, {})[group.group_id] = record.step, True
            for rejection in record.rejected:
                found.setdefault(rejection.path, {})[rejection.group_id] = record.step, False
        return cls(found)


def look_at_experience(layout: RunLayout, batches: Sequence[BatchRecord]) -> Experience:
    """Look at every trajectory file of the run once."""
    fates = _Fates.read(batches)
    found = Experience(_no_rows())
    parts: list[Rows] = []
    damaged = 0
    try:
        paths = list(iterate_files(layout))
    except MilesbatchError as error:
        return Experience(_no_rows(), gaps=[error.what])
    for path in paths:
        try:
            table = _read(path)
            parts.append(_add_file(path, table, fates.of.get(path.name, {}), found))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            damaged += 1
            if damaged <= _MOST_GAPS:
                found.gaps.append(f"{path.relative_to(layout.root)} cannot be read ({_one_line(error)})")
    if damaged > _MOST_GAPS:
        found.gaps.append(f"{damaged - _MOST_GAPS} more trajectory files cannot be read")
    missing = sorted(set(fates.of) - {path.name for path in paths})
    if missing:
        found.gaps.append(
            f"{len(missing)} trajectory files that batch records name are missing, the first is {missing[0]}"
        )
    if parts:
        found.rows = Rows(*(np.concatenate([getattr(p, name) for p in parts]) for name in Rows.__slots__))
    return found


def _read(path: Path) -> Any:
    """The columns of a file; the bytes of the others (most of it) are not touched."""
    with pa.memory_map(str(path)) as source:
        schema = pa.ipc.open_file(source).schema
        wanted = [schema.get_field_index(name) for name in COLUMNS]
        if min(wanted) < 0:
            raise ValueError(f"it has no column {COLUMNS[wanted.index(min(wanted))]}")
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        table = pa.ipc.open_file(source, options=options).read_all()
        table.validate(full=True)
        return table.combine_chunks()


def _add_file(path: Path, table: Any, fates: dict[int, tuple[int, bool]], found: Experience) -> Rows:
    groups, lengths = _ints(table["group_id"]), _ints(table["response_tokens"])
    found.trajectories += len(groups)
    found.tokens += int(lengths.sum())
    errors = table["error"]
    for text, number in zip(*_counts(errors.drop_null()), strict=True):
        cause = cause_of(text)
        if cause in found.causes or len(found.causes) < _MOST_CAUSES:
            found.causes[cause] += number
    reasons = table["finish_reason"].cast(pa.string())
    found.finish_reasons.update(dict(zip(*_counts(reasons), strict=True)))
    known = np.array([group in fates for group in groups.tolist()], bool)
    found.pending += int((~known).sum())
    steps = np.array([fates[group][0] if group in fates else -1 for group in groups.tolist()], np.int64)
    trained = np.array([group in fates and fates[group][1] for group in groups.tolist()], bool)
    _add_lags(table, steps, trained, found)
    found.files.append(path)
    rows = Rows(
        step=steps,
        is_trained=trained,
        group=groups,
        sample=_ints(table["sample_index"]),
        reward=np.asarray(_array(table["reward"]).to_numpy(zero_copy_only=False), np.float64),
        length=lengths,
        is_failed=np.asarray(_array(errors.is_valid()).to_numpy(zero_copy_only=False), bool),
        is_cut=np.asarray(_array(pc.equal(reasons, "length")).to_numpy(zero_copy_only=False), bool),
        file=np.full(len(groups), len(found.files) - 1, np.int64),
    )
    return Rows(*(getattr(rows, name)[known] for name in Rows.__slots__))


def _add_lags(table: Any, steps: Ints, trained: NDArray[np.bool_], found: Experience) -> None:
    """Step k trains version k - 1: a token of version v is k - 1 - v versions behind."""
    spans = _array(table["versions"])
    counts = _ints(pc.list_value_length(spans))
    flat = spans.flatten()
    begins, versions = _ints(flat.field(0)), _ints(flat.field(1))
    row = np.repeat(np.arange(len(counts)), counts)
    totals = _ints(table["prompt_tokens"]) + _ints(table["response_tokens"])
    ends = np.append(begins[1:], 0)
    is_last = np.append(row[1:] != row[:-1], True) if len(row) else np.zeros(0, bool)
    ends = np.where(is_last, totals[row], ends)
    wanted = trained[row]
    lags = np.clip(steps[row] - 1 - versions, 0, LAGS - 1)[wanted]
    tokens = np.maximum(ends - begins, 0)[wanted]
    keys = steps[row][wanted] * LAGS + lags
    for key, number in zip(*_sums(keys, tokens), strict=True):
        step, lag = divmod(key, LAGS)
        found.lag_tokens.setdefault(step, [0] * LAGS)[lag] += number


def _sums(keys: Ints, amounts: Ints) -> tuple[list[int], list[int]]:
    unique, place = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    np.add.at(sums, place, amounts)
    return unique.tolist(), sums.tolist()


def _counts(texts: Any) -> tuple[list[str], list[int]]:
    counted = pc.value_counts(_array(texts))
    return [str(v) for v in counted.field(0).to_pylist()], counted.field(1).to_pylist()


def cause_of(error: str) -> str:
    """The first line of an error without what differs from one episode to the next."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["(no text)"]
    text = _DETAIL.sub("#", lines[0])
    return text if len(text) <= _LONGEST_CAUSE else text[: _LONGEST_CAUSE - 1] + "…"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _array(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else column.combine_chunks()
    )


def _ints(column: Any) -> Ints:
    array = _array(column)
    if array.null_count:
        raise ValueError("a column that is never null has nulls")
    return np.asarray(array.to_numpy(zero_copy_only=False), np.int64)


def _no_rows() -> Rows:
    ints, flags = np.zeros(0, np.int64), np.zeros(0, bool)
    return Rows(ints, flags, ints, ints, np.zeros(0), ints, flags, flags, ints)
