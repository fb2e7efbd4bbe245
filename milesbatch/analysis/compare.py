"""Two sets of trajectories on the same prompts: what changed, prompt by prompt, and whether the tokens are equal.

Owns the matching and the order of changes. Never reads a text: the samples that are worth showing are named by group
and index. Invariant: each sample is matched at most once; the k-th sample of a prompt on one side with the k-th on the
other, by group and index. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch.analysis.history import Ints
from milesbatch.analysis.scan import TrajectoryScan

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
_COLUMNS = (
    "prompt_id",
    "group_id",
    "sample_index",
    "step",
    "reward",
    "response_tokens",
    "prompt_tokens",
    "tokens",
    "error",
)
_KEPT = ("prompt_id", "group_id", "sample_index", "reward", "response_tokens")


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: a run, or one step of it."""

    label: str
    scan: TrajectoryScan
    step: int | None = None


@dataclass(frozen=True, slots=True)
class SideSummary:
    """One side by itself; means are over its samples whose episode did not fail."""

    label: str
    samples: int
    failed: int
    prompts: int
    reward_mean: float | None
    length_mean: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """One prompt that both sides have; means over its samples whose episode did not fail, and the pair that differs
    most."""

    prompt_id: str
    reward: tuple[float, float]
    length: tuple[float, float]
    samples: tuple[int, int]
    shown: tuple[tuple[int, int], tuple[int, int]]
    """(group, sample) of each side."""
    shown_rewards: tuple[float, float]
    tokens_equal: bool
    """Of the shown pair."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result; ``changes`` holds the most changed prompts, most changed first."""

    sides: tuple[SideSummary, SideSummary]
    matched_by: Literal["prompt_id", "prompt tokens"]
    common_prompts: int
    only: tuple[int, int]
    """Prompts that only one of the sides has."""
    reward_mean: tuple[float | None, float | None]
    """Over the common prompts, each counted once."""
    length_mean: tuple[float | None, float | None]
    better: int
    """Common prompts whose mean reward is higher on the second side."""
    worse: int
    unchanged: int
    matched_samples: int
    equal_samples: int
    """Matched samples with equal tokens, prompt included."""
    changes: tuple[Change, ...]

    @property
    def are_equal(self) -> bool:
        """Do both sides hold the same samples with the same tokens?"""
        first, second = self.sides
        return self.equal_samples == self.matched_samples == first.samples == second.samples > 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """A side as columns."""

    table: Any
    prompt_hash: Words
    token_hash: Words
    failed: NDArray[np.bool_]


def compare(first: Side, second: Side, *, most: int = 5) -> Comparison:
    """Compare by prompt id; by the tokens of the prompt where no id is on both sides (ids that count through the
    stream)."""
    rows = (_read(first), _read(second))
    codes = _codes([row.table["prompt_id"].combine_chunks() for row in rows])
    matched_by: Literal["prompt_id", "prompt tokens"] = "prompt_id"
    if not len(np.intersect1d(*codes)):
        by_tokens = _codes([pa.array(row.prompt_hash) for row in rows])
        if len(np.intersect1d(*by_tokens)):
            codes, matched_by = by_tokens, "prompt tokens"
    return _compared((first, second), rows, codes, matched_by, most)


def _read(side: Side) -> _Rows:
    counted = side.scan.counted
    files = None if side.step is None else counted.files_of(counted.step == side.step)
    tables, prompts, tokens, failed = [], [], [], []
    for batch in side.scan.batches(_COLUMNS, files):
        table = pa.Table.from_batches([batch])
        if side.step is not None:
            table = table.filter(pc.equal(table["step"], side.step))
        if not table.num_rows:
            continue
        lists = table["tokens"].combine_chunks()
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
        values = lists.flatten().to_numpy()
        prompts.append(_hashes(values, lengths, table["prompt_tokens"].to_numpy().astype(np.int64)))
        tokens.append(_hashes(values, lengths, lengths))
        failed.append(pc.is_valid(table["error"]).to_numpy())
        tables.append(table.select(_KEPT))
    schema = side.scan.table(_KEPT, []).schema
    whole = pa.concat_tables([schema.empty_table(), *tables])
    none: list[Any] = [np.array([], np.uint64)]
    return _Rows(
        whole,
        np.concatenate(none + prompts),
        np.concatenate(none + tokens),
        np.concatenate([np.array([], bool), *failed]),
    )


def _hashes(values: Any, lengths: Ints, kept: Ints) -> Words:
    """A 64-bit hash of the first ``kept`` tokens of each row, their number included."""
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(values), dtype=np.int64) - np.repeat(starts, lengths)
    mixed = _mix(values.astype(np.uint64) + place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    mixed[place >= np.repeat(kept, lengths)] = 0
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return _mix(sums[starts + lengths] - sums[starts] + kept.astype(np.uint64))


def _mix(words: Words) -> Words:
    """Spread the bits of each word over the whole word (multiply and shift; unsigned numbers wrap around)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _codes(columns: list[Any]) -> tuple[Ints, Ints]:
    """Equal values of both columns as equal numbers."""
    encoded = pa.concat_arrays(columns).dictionary_encode()
    numbers = np.asarray(encoded.indices, np.int64)
    return numbers[: len(columns[0])], numbers[len(columns[0]) :]


def _means(codes: Ints, values: Floats, good: NDArray[np.bool_], size: int) -> Floats:
    """Mean by code; NaN where there is none."""
    count = np.bincount(codes[good], minlength=size)
    total = np.bincount(codes[good], values[good], size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _compared(
    sides: tuple[Side, Side],
    rows: tuple[_Rows, _Rows],
    codes: tuple[Ints, Ints],
    matched_by: Literal["prompt_id", "prompt tokens"],
    most: int,
) -> Comparison:
    size = max((int(part.max()) + 1 for part in codes if len(part)), default=0)
    has = [np.bincount(part, minlength=size) for part in codes]
    both = (has[0] > 0) & (has[1] > 0)
    reward = [_means(c, r.table["reward"].to_numpy(), ~r.failed, size) for c, r in zip(codes, rows, strict=True)]
    length = [
        _means(c, r.table["response_tokens"].to_numpy().astype(float), ~r.failed, size)
        for c, r in zip(codes, rows, strict=True)
    ]
    judged = both & ~np.isnan(reward[0]) & ~np.isnan(reward[1])
    delta = np.where(judged, reward[1] - reward[0], 0)
    left, right = _matched(codes, rows)
    equal = rows[0].token_hash[left] == rows[1].token_hash[right]
    changes = _changes(rows, codes, reward, length, has, judged, (left, right, equal), most)
    return Comparison(
        sides=(_summary(sides[0], rows[0], has[0]), _summary(sides[1], rows[1], has[1])),
        matched_by=matched_by,
        common_prompts=int(both.sum()),
        only=(int(((has[0] > 0) & ~both).sum()), int(((has[1] > 0) & ~both).sum())),
        reward_mean=(_mean(reward[0][judged]), _mean(reward[1][judged])),
        length_mean=(_mean(length[0][judged]), _mean(length[1][judged])),
        better=int((delta > 0).sum()),
        worse=int((delta < 0).sum()),
        unchanged=int((judged & (delta == 0)).sum()),
        matched_samples=len(left),
        equal_samples=int(equal.sum()),
        changes=changes,
    )


def _summary(side: Side, rows: _Rows, has: Ints) -> SideSummary:
    good = ~rows.failed
    return SideSummary(
        label=side.label,
        samples=len(good),
        failed=int(rows.failed.sum()),
        prompts=int((has > 0).sum()),
        reward_mean=_mean(rows.table["reward"].to_numpy()[good]),
        length_mean=_mean(rows.table["response_tokens"].to_numpy()[good].astype(float)),
    )


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _matched(codes: tuple[Ints, Ints], rows: tuple[_Rows, _Rows]) -> tuple[Ints, Ints]:
    """Places of matched samples on both sides."""
    keys, orders = [], []
    for part, row in zip(codes, rows, strict=True):
        order = np.lexsort((row.table["sample_index"].to_numpy(), row.table["group_id"].to_numpy(), part))
        ordered = part[order]
        first = np.searchsorted(ordered, ordered, side="left")
        keys.append(np.stack((ordered, np.arange(len(ordered)) - first)))
        orders.append(order)
    most = max((int(key[1].max()) + 1 for key in keys if key.shape[1]), default=1)
    flat = [key[0] * most + key[1] for key in keys]
    _, left, right = np.intersect1d(flat[0], flat[1], assume_unique=True, return_indices=True)
    return orders[0][left], orders[1][right]


def _changes(
    rows: tuple[_Rows, _Rows],
    codes: tuple[Ints, Ints],
    reward: list[Floats],
    length: list[Floats],
    has: list[Ints],
    judged: NDArray[np.bool_],
    pairs: tuple[Ints, Ints, NDArray[np.bool_]],
    most: int,
) -> tuple[Change, ...]:
    left, right, equal = pairs
    prompts = np.flatnonzero(judged)
    by_length = np.abs(length[1] - length[0])[prompts]
    by_reward = np.abs(reward[1] - reward[0])[prompts]
    order = np.lexsort((prompts, -by_length, -by_reward))
    ranked = [int(p) for p in prompts[order][:most] if by_reward.any() or by_length.any() or not equal.all()]
    own = [row.table["reward"].to_numpy() for row in rows]
    found = []
    for code in ranked:
        here = np.flatnonzero(codes[0][left] == code)
        gap = np.abs(own[1][right[here]] - own[0][left[here]])
        at = here[np.lexsort((equal[here], -gap))[0]]
        a, b = int(left[at]), int(right[at])
        if equal[at] and reward[0][code] == reward[1][code]:
            continue
        found.append(
            Change(
                prompt_id=rows[1].table["prompt_id"][b].as_py(),
                reward=(float(reward[0][code]), float(reward[1][code])),
                length=(float(length[0][code]), float(length[1][code])),
                samples=(int(has[0][code]), int(has[1][code])),
                shown=(_key(rows[0], a), _key(rows[1], b)),
                shown_rewards=(float(own[0][a]), float(own[1][b])),
                tokens_equal=bool(equal[at]),
            )
        )
    return tuple(found)


def _key(rows: _Rows, place: int) -> tuple[int, int]:
    return rows.table["group_id"][place].as_py(), rows.table["sample_index"][place].as_py()
