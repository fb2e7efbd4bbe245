"""What the counted trajectories say, from one pass over a few of their columns: lag of tokens, failed episodes, and samples to
choose from.

Owns: the sums. Never: which trajectories count, and reading them (``analysis/``), tokens, texts. Invariant: a damaged file
costs its own rows only and is told; about 45 bytes of memory for a trajectory. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch.analysis.choose import CANDIDATE_COLUMNS, Candidates
from milesbatch.analysis.counted import PENDING, Counted, count_groups
from milesbatch.analysis.history import REASONS
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.errors import MilesbatchError
from milesbatch.store.layout import RunLayout

_COLUMNS = (*CANDIDATE_COLUMNS, "cause", "versions", "prompt_tokens")
LAGS = 5
"""Lags 0, 1, 2, 3, and 4 with all above it."""
_MOST_CAUSES = 1000
_MOST_GAPS = 20

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Experience:
    """Sums over all trajectories that count, and a few numbers of those that have a fate."""

    counted: Counted | None = None
    """None: it could not be found out which ones count."""
    candidates: Candidates = field(default_factory=lambda: Candidates.join([]))
    lag_tokens: dict[int, list[int]] = field(default_factory=dict)
    """Step -> trained response tokens by lag in versions, as ``LAGS`` says."""
    causes: Counter[str] = field(default_factory=Counter)
    """Failed episodes by cause; what differs from one episode to the next is left out of it."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    trajectories: int = 0
    tokens: int = 0
    pending: int = 0
    """Trajectories whose group has no fate (yet)."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Groups, by reason."""
    gaps: list[str] = field(default_factory=list)


def look_at_experience(layout: RunLayout) -> Experience:
    """Look at every trajectory file once."""
    try:
        counted = count_groups(layout)
    except MilesbatchError as error:
        return Experience(gaps=[error.what])
    scan, found = TrajectoryScan(counted), Experience(counted)
    found.candidates = Candidates.join(_add(batch, found) for batch in scan.batches(_COLUMNS))
    found.rejected.update({reason: int((counted.reason == code).sum()) for code, reason in enumerate(REASONS)})
    found.gaps = list(_gaps(scan))
    return found


def _gaps(scan: TrajectoryScan) -> Iterator[str]:
    texts = [error.what for error in scan.errors]
    yield from texts[:_MOST_GAPS]
    if len(texts) > _MOST_GAPS:
        yield f"{len(texts) - _MOST_GAPS} more files of the run's experience cannot be read"


def _add(batch: Any, found: Experience) -> Candidates:
    """Add the rows to the sums; gives those that have a fate."""
    rows = Candidates.of(batch)
    found.trajectories += len(rows)
    found.tokens += int(rows.length.sum())
    for cause, number in _counts(batch["cause"].drop_null()):
        if cause in found.causes or len(found.causes) < _MOST_CAUSES:
            found.causes[cause] += number
    found.finish_reasons.update(dict(_counts(batch["finish_reason"])))
    has_fate = rows.step != PENDING
    found.pending += int((~has_fate).sum())
    _add_lags(batch, rows, found)
    return rows.of_rows(has_fate)


def _add_lags(batch: Any, rows: Candidates, found: Experience) -> None:
    """Step k trains version k - 1: a token of version v is k - 1 - v versions behind."""
    spans = batch["versions"]
    counts = _ints(pc.list_value_length(spans))
    flat = spans.flatten()
    begins, versions = _ints(flat.field("start")), _ints(flat.field("version"))
    row = np.repeat(np.arange(len(counts)), counts)
    totals = _ints(batch["prompt_tokens"]) + rows.length
    is_last = np.append(row[1:] != row[:-1], True) if len(row) else np.zeros(0, bool)
    ends = np.where(is_last, totals[row], np.append(begins[1:], 0))
    wanted = rows.is_trained[row]
    steps = rows.step[row][wanted]
    lags = np.clip(steps - 1 - versions[wanted], 0, LAGS - 1)
    keys, place = np.unique(steps * LAGS + lags, return_inverse=True)
    sums = np.bincount(place, np.maximum(ends - begins, 0)[wanted], len(keys))
    for key, number in zip(keys.tolist(), sums.tolist(), strict=True):
        step, lag = divmod(key, LAGS)
        found.lag_tokens.setdefault(step, [0] * LAGS)[lag] += round(number)


def _counts(texts: Any) -> Iterator[tuple[str, int]]:
    counted = pc.value_counts(texts)
    yield from zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)


def _ints(array: Any) -> Ints:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.int64)
