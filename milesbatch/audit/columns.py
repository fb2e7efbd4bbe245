"""What a trajectory file holds, from the few columns that an audit needs: no Python object for a token.

Owns the checks inside one file; never asks whether the file counts. Invariant: the bytes are digested before Arrow parses any
of them, and they are the bytes that are parsed. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch import FORMAT_VERSION
from milesbatch.decisions.seeds import derive_seed
from milesbatch.errors import FormatVersionError
from milesbatch.store.layout import TrajectoryName
from milesbatch.trajectories.schema import KEY_FORMAT, FileMetadata, trajectory_schema
from milesbatch.trajectories.trajectory import LEAST_LOGPROB, MOST_LOGPROB

COLUMNS = (
    "group_id", "sample_index", "versions", "weights_digest", "seed",
    "worker", "incarnation", "prompt_tokens", "response_tokens", "tokens", "logprobs",
)  # fmt: skip
_TYPES = {name: trajectory_schema().field(name).type for name in COLUMNS}
_NO_VERSION = np.iinfo(np.int64).max
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group as its rows show it; versions are -1 when the policy wrote no token."""

    samples: int
    version_min: int
    version_max: int


@dataclass(slots=True)
class FileFacts:
    """A trajectory file as its bytes show it."""

    digest: str
    rows: int = 0
    metadata: FileMetadata | None = None
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    """Policy versions of its tokens, ascending."""
    weights: set[tuple[int, str]] = field(default_factory=set)
    """Newest version of a row, and the weights digest that the row states for it."""
    problems: list[str] = field(default_factory=list)
    """What no writer commits."""


def read_facts(
    path: Path, data: bytes, digest: str, name: TrajectoryName, run_seed: int | None, vocabulary: int | None
) -> FileFacts:
    """Facts of the file ``path`` with the content ``data`` of that digest; ``run_seed`` and ``vocabulary`` (how many token ids
    the run's model has) are None where they are not known.

    Raises:
        FormatVersionError: written by a newer major format version.
    """
    facts = FileFacts(digest)
    try:
        columns = _read_columns(path, data, facts)
        if not facts.problems:
            _look_at_rows(columns, name, run_seed, facts)
            _check_tokens(columns, vocabulary, facts)
    except (pa.ArrowException, OSError, ValueError, KeyError, UnicodeDecodeError) as error:
        facts.problems.append(f"it cannot be read as a trajectory file ({error})")
    return facts


def _read_columns(path: Path, data: bytes, facts: FileFacts) -> dict[str, Any]:
    buffer = pa.py_buffer(data)
    schema = pa.ipc.open_file(buffer).schema
    metadata = schema.metadata or {}
    text = metadata.get(KEY_FORMAT, b"").decode(errors="replace")
    major = text.partition(".")[0]
    if major.isascii() and major.isdigit() and int(major) > FORMAT_VERSION[0]:
        raise FormatVersionError(
            f"{path}: format {text} is newer than the {FORMAT_VERSION[0]} that this version reads",
            mend="audit this run with a newer milesbatch",
        )
    if text.split(".")[:1] != [str(FORMAT_VERSION[0])]:
        facts.problems.append(f"its metadata states format {text!r}")
    facts.metadata = FileMetadata.from_arrow(metadata)
    for name in COLUMNS:
        index = schema.get_field_index(name)
        if index < 0 or schema.field(index).type != _TYPES[name]:
            facts.problems.append(f"column {name} is {'missing' if index < 0 else schema.field(index).type}")
    if facts.problems:
        return {}
    wanted = [schema.get_field_index(name) for name in COLUMNS]
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    table = pa.ipc.open_file(buffer, options=options).read_all()
    return {name: _array(table.column(name)) for name in COLUMNS}


def _array(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _ints(array: Any) -> Ints:
    if array.null_count:
        raise ValueError("a column that is never null has nulls")
    return np.asarray(array.to_numpy(zero_copy_only=False), np.int64)


def _look_at_rows(columns: dict[str, Any], name: TrajectoryName, run_seed: int | None, facts: FileFacts) -> None:
    groups, samples = _ints(columns["group_id"]), _ints(columns["sample_index"])
    facts.rows = len(groups)
    if not facts.rows:
        facts.problems.append("it has no rows")
        return
    starts = np.flatnonzero(np.concatenate(([True], np.diff(groups) != 0)))
    sizes = np.diff(np.append(starts, facts.rows))
    _check_order(name, groups[starts], samples, starts, sizes, facts)
    _check_writer(columns, name, facts)
    row_min, row_max = _versions(columns, facts)
    least, most = np.minimum.reduceat(row_min, starts), np.maximum.reduceat(row_max, starts)
    least = np.where(least == _NO_VERSION, -1, least)
    for group, size, low, high in zip(
        groups[starts].tolist(), sizes.tolist(), least.tolist(), most.tolist(), strict=True
    ):
        facts.groups[group] = GroupFacts(size, low, high)
    _weights(columns["weights_digest"], row_max, facts)
    if run_seed is not None:
        _check_seeds(_ints(columns["seed"]), groups, samples, run_seed, facts)


def _check_order(name: TrajectoryName, ids: Ints, samples: Ints, starts: Ints, sizes: Ints, facts: FileFacts) -> None:
    if (np.diff(ids) <= 0).any():
        facts.problems.append("its rows are not sorted by group")
    if (samples != np.arange(facts.rows) - np.repeat(starts, sizes)).any():
        facts.problems.append("the samples of a group are not 0, 1, 2 ...")
    if (int(ids[0]), int(ids[-1])) != (name.first_group, name.last_group):
        facts.problems.append(f"it holds groups {ids[0]} to {ids[-1]}, which its name does not say")


def _check_writer(columns: dict[str, Any], name: TrajectoryName, facts: FileFacts) -> None:
    if (_ints(columns["incarnation"]) != name.incarnation).any():
        facts.problems.append("a row is of another incarnation than its name says")
    if columns["worker"].unique().to_pylist() != [name.worker]:
        facts.problems.append("a row is of another worker than its name says")


def _versions(columns: dict[str, Any], facts: FileFacts) -> tuple[Ints, Ints]:
    """Oldest and newest version of each row; ``_NO_VERSION`` and -1 where there is none."""
    spans = columns["versions"]
    lengths = _ints(pc.list_value_length(spans))
    flat = spans.flatten()
    begins, numbers = _ints(flat.field(0)), _ints(flat.field(1))
    ends = np.cumsum(lengths)
    firsts = (ends - lengths)[lengths > 0]
    row_min, row_max = np.full(facts.rows, _NO_VERSION, np.int64), np.full(facts.rows, -1, np.int64)
    if len(firsts):
        row_min[lengths > 0] = np.minimum.reduceat(numbers, firsts)
        row_max[lengths > 0] = np.maximum.reduceat(numbers, firsts)
    inside = np.ones(max(len(numbers) - 1, 0), bool)
    inside[firsts[1:] - 1] = False
    if ((np.diff(numbers) <= 0) | (np.diff(begins) <= 0))[inside].any() or (numbers < 0).any():
        facts.problems.append("the versions of a row do not ascend")
    if (begins[firsts] != _ints(columns["prompt_tokens"])[lengths > 0]).any():
        facts.problems.append("the versions of a row do not begin at its first policy token")
    if (_ints(columns["response_tokens"])[lengths == 0] > 0).any():
        facts.problems.append("a row has response tokens, but no policy version")
    facts.versions = tuple(np.unique(numbers).tolist())
    return row_min, row_max


def _weights(column: Any, row_max: Ints, facts: FileFacts) -> None:
    encoded = column.dictionary_encode()
    digests = encoded.dictionary.to_pylist()
    pairs = np.unique(np.stack((row_max, _ints(encoded.indices))), axis=1)
    facts.weights = {(version, digests[index]) for version, index in pairs.T.tolist() if version >= 0}


def _check_tokens(columns: dict[str, Any], vocabulary: int | None, facts: FileFacts) -> None:
    """Over all rows at once: which row it is, reading the file says."""
    tokens = columns["tokens"].flatten().to_numpy(zero_copy_only=False)
    most = np.iinfo(np.int32).max if vocabulary is None else vocabulary - 1
    if not ((tokens >= 0) & (tokens <= most)).all():
        facts.problems.append(f"it has tokens {tokens.min()} to {tokens.max()}; the model has token ids 0 .. {most}")
    logprobs = columns["logprobs"].flatten().to_numpy(zero_copy_only=False)
    if not ((logprobs >= LEAST_LOGPROB) & (logprobs <= MOST_LOGPROB)).all():  # NaN is neither
        found = f"{logprobs.min()} to {logprobs.max()}"
        facts.problems.append(f"it has logprobs {found}; {LEAST_LOGPROB} to 0 are those of tokens that were drawn")


def _check_seeds(seeds: Ints, groups: Ints, samples: Ints, run_seed: int, facts: FileFacts) -> None:
    for seed, group, sample in zip(seeds.tolist(), groups.tolist(), samples.tolist(), strict=True):
        if seed != derive_seed(run_seed, "sample", group, sample):
            facts.problems.append(f"group {group}, sample {sample} has seed {seed}, which is not that of the run")
            return
