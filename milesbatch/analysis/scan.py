"""Every counted trajectory exactly once, as record batches of the columns that are asked for; memory stays flat.

Owns the walk over the files of a run: read ahead, parsed, joined with the fates, put together to batches of useful
size. Never raises for a file that is damaged or gone: it is in ``errors``, and the rest is there. Invariant: a row is
given only when its group is counted in its file (:mod:`milesbatch.analysis.counted`). The page behind it is
``docs/trajectories.md``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from milesbatch.analysis.counted import FATES, PENDING, Counted
from milesbatch.analysis.files import FILE_COLUMNS, parse_columns, read_bytes
from milesbatch.analysis.history import NO_REASON, REASONS
from milesbatch.errors import CorruptArtefactError, MilesbatchError
from milesbatch.trajectories.schema import trajectory_schema

_BATCH_ROWS = 16_384
_BATCH_BYTES = 32 << 20
_CHUNK_FILES = 8
_READERS = 4
_SLOW_FILE_S = 0.003
"""As on a shared filesystem under load, whose latency is then worth hiding."""

Loaded = tuple[int, Path, bytes | MilesbatchError | None]
"""Number of a file, its path, and its bytes: None for a large one, to be read in parts."""


def _loose(name: str, of: Any) -> Any:
    if name == "finish_reason":
        return pa.field(name, pa.string())
    return pa.field(name, pa.list_(pa.binary()) if name == "routed_experts" else of)


ADDED = (
    pa.field("file", pa.string()),
    pa.field("fate", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("step", pa.int64()),
    pa.field("version_min", pa.int64()),
    pa.field("version_max", pa.int64()),
    pa.field("staleness", pa.int64()),
    pa.field("cause", pa.string()),
)
SCHEMA: Any = pa.schema([*(_loose(field.name, field.type) for field in trajectory_schema()), *ADDED])
COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)
GROUP_COLUMNS = frozenset({"group_id", "file", "fate", "reason", "step"})
"""Columns that are known of a group without reading its file."""
_NEEDS = {"version_min": "versions", "version_max": "versions", "staleness": "versions", "cause": "error"}

_NAMED_FUNCTION = r"^reward function \S+ failed on prompt .*?: "
_PLACE = r"^(?P<text>.*?)(?P<place> \([^()]*:\d+\))?$"
_LONGEST_CAUSE = 160


class TrajectoryScan:
    """The counted rows of a run, to be read any number of times."""

    def __init__(self, counted: Counted, *, verify: bool = False) -> None:
        self.counted = counted
        self.verify = verify
        self._errors: dict[str, MilesbatchError] = {}

    @property
    def errors(self) -> list[MilesbatchError]:
        """What could not be read so far, each file once."""
        return [*self.counted.errors, *self._errors.values()]

    def batches(self, columns: Sequence[str], files: Collection[int] | None = None) -> Iterator[Any]:
        """Record batches (``pyarrow.RecordBatch``) with ``columns`` of ``SCHEMA``, in that order, by group.

        ``files`` (numbers in ``counted.files``) is all of them by default; all counted rows of these files are given.
        """
        read = {"group_id"} | {_NEEDS.get(name, name) for name in columns}
        of_file = [name for name in FILE_COLUMNS if name in read]
        for numbers, tables in self._gathered(of_file, files):
            table = self._joined(numbers, tables, columns)
            yield from table.combine_chunks().to_batches()

    def table(self, columns: Sequence[str], files: Collection[int] | None = None) -> Any:
        """All of :meth:`batches` in one ``pyarrow.Table``."""
        schema = pa.schema([SCHEMA.field(name) for name in columns])
        return pa.Table.from_batches(self.batches(columns, files), schema)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _gathered(self, columns: Sequence[str], files: Collection[int] | None) -> Iterator[tuple[list[int], list[Any]]]:
        """Files in the order of their groups, as many at a time as make a batch."""
        numbers: list[int] = []
        tables: list[Any] = []
        rows = size = 0
        for number, table in self._read(columns, files):
            numbers.append(number)
            tables.append(table)
            rows, size = rows + table.num_rows, size + table.nbytes
            if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield numbers, tables
                numbers, tables, rows, size = [], [], 0, 0
        if tables:
            yield numbers, tables

    def _read(self, columns: Sequence[str], files: Collection[int] | None) -> Iterator[tuple[int, Any]]:
        for number, path, loaded in self._loaded(range(len(self.counted.files)) if files is None else sorted(files)):
            try:
                if isinstance(loaded, MilesbatchError):
                    raise loaded
                yield number, parse_columns(path, loaded, columns)
            except FileNotFoundError:
                self._note_missing(number)
            except MilesbatchError as error:
                self._errors.setdefault(self.counted.files[number], error)

    def _loaded(self, files: Collection[int]) -> Iterator[Loaded]:
        """Contents of files. Where opening one takes long, a few are read at the same time, ahead of their use; where
        it does not, threads only wait for each other."""
        chunks = iter(lambda source=iter(files): list(islice(source, _CHUNK_FILES)), [])  # type: ignore[misc]
        for chunk in chunks:
            began = time.monotonic()
            found = self._load(chunk)
            is_slow = time.monotonic() - began > _SLOW_FILE_S * len(chunk)
            yield from found
            if is_slow:
                break
        with ThreadPoolExecutor(_READERS) as pool:
            waiting: list[Future[list[Loaded]]] = []
            for chunk in chunks:
                waiting.append(pool.submit(self._load, chunk))
                if len(waiting) > _READERS:
                    yield from waiting.pop(0).result()
            for future in waiting:
                yield from future.result()

    def _load(self, numbers: Sequence[int]) -> list[Loaded]:
        found: list[Loaded] = []
        for number in numbers:
            path = self.counted.path(number)
            try:
                found.append((number, path, read_bytes(path, verify=self.verify)))
            except FileNotFoundError:
                self._note_missing(number)
            except MilesbatchError as error:
                found.append((number, path, error))
        return found

    def _note_missing(self, number: int) -> None:
        """Of groups without a fate a worker may have moved the file away meanwhile."""
        name, path = self.counted.files[number], self.counted.path(number)
        if (self.counted.step[self.counted.file == number] != PENDING).any():
            mend = "run `milesbatch audit` on the run; without this file its groups are not counted here"
            self._errors.setdefault(name, CorruptArtefactError(f"{path} is missing", mend=mend, unseen=path))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _joined(self, numbers: Sequence[int], tables: Sequence[Any], columns: Sequence[str]) -> Any:
        counted = self.counted
        table = pa.concat_tables([table.replace_schema_metadata() for table in tables])
        files = np.repeat(np.array(numbers, np.int32), [table.num_rows for table in tables])
        positions = counted.positions(table["group_id"].to_numpy())
        counts = (positions >= 0) & (counted.file[positions] == files) if len(counted.file) else positions >= 0
        if not counts.all():
            table, files, positions = table.filter(pa.array(counts)), files[counts], positions[counts]
        added = _Added(counted, table, files, positions)
        made = [added.column(name) if name not in table.column_names else table[name] for name in columns]
        fields = [SCHEMA.field(name) for name in columns]
        cast = [column.cast(field.type) for column, field in zip(made, fields, strict=True)]
        return pa.Table.from_arrays(cast, schema=pa.schema(fields))


class _Added:
    """Columns that no file holds."""

    def __init__(self, counted: Counted, table: Any, files: NDArray[np.int32], positions: NDArray[np.int64]) -> None:
        self._counted, self._table, self._files, self._positions = counted, table, files, positions

    def column(self, name: str) -> Any:
        counted, at = self._counted, self._positions
        if name == "file":
            first = int(self._files.min()) if len(self._files) else 0
            last = int(self._files.max()) if len(self._files) else 0
            names = pa.array(counted.files[first : last + 1], pa.string())
            return pa.chunked_array([names.take(pa.array(self._files - first))])
        if name == "fate":
            return _chunk(pa.array(FATES, pa.string()).take(pa.array(counted.fate_code[at])))
        if name == "reason":
            reason = counted.reason[at]
            return _chunk(pa.array(REASONS, pa.string()).take(pa.array(reason, mask=reason == NO_REASON)))
        if name == "step":
            return _chunk(pa.array(counted.step[at], mask=counted.step[at] == PENDING))
        if name == "cause":
            encoded = self._table["error"].combine_chunks().dictionary_encode()
            return _chunk(causes(encoded.dictionary).take(encoded.indices))
        return self._versions(name)

    def _versions(self, name: str) -> Any:
        spans = self._table["versions"].combine_chunks()
        lengths = pc.list_value_length(spans).to_numpy(zero_copy_only=False)
        numbers = spans.flatten().field("version").to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        is_last = name == "version_max"
        places = np.where(lengths > 0, ends - 1 if is_last else ends - lengths, 0)
        values = numbers[places] if len(numbers) else np.zeros(len(places), np.int64)
        if name != "staleness":
            return _chunk(pa.array(values, mask=lengths == 0))
        step = self._counted.step[self._positions]
        return _chunk(pa.array(step - 1 - values, mask=(lengths == 0) | (step == PENDING)))


def _chunk(array: Any) -> Any:
    return pa.chunked_array([array])


def causes(errors: Any) -> Any:
    """What failed, without what differs from sample to sample: names of prompts, numbers, quoted text. ``errors`` is
    an array of strings; where it is null, so is the result."""
    text = pc.replace_substring_regex(errors, r"(?s)\n.*$", "")
    parts = pc.extract_regex(pc.replace_substring_regex(text, _NAMED_FUNCTION, ""), _PLACE)
    said, place = pc.struct_field(parts, "text"), pc.struct_field(parts, "place")
    said = pc.replace_substring_regex(said, r"'[^']*'|\"[^\"]*\"", "'...'")
    said = pc.utf8_slice_codeunits(pc.replace_substring_regex(said, r"[0-9]+(\.[0-9]+)?", "#"), 0, _LONGEST_CAUSE)
    return pc.binary_join_element_wise(said, place, "")
