"""Some columns of a trajectory file, quickly: for the many files of a long run.

Owns how a file is opened for analysis. Never says whether it counts. Invariants: a file that is read whole (a small
one, or any with ``verify``) is digested before Arrow parses any of it; of a larger one only the asked columns are
read, and Arrow checks their structure before anybody follows an offset. The page behind it is
``docs/trajectories.md``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from milesbatch import FORMAT_VERSION
from milesbatch.errors import CorruptArtefactError
from milesbatch.records import digest_bytes
from milesbatch.store.durable import storage_error
from milesbatch.trajectories.reader import read_table
from milesbatch.trajectories.schema import KEY_FORMAT, trajectory_schema
from milesbatch.trajectories.writer import TAG_DIGITS

WHOLE_BYTES = 1 << 20
"""Up to here reading a file whole costs about as much as reading the parts that are needed."""
FILE_COLUMNS: tuple[str, ...] = tuple(trajectory_schema().names)
_MAJOR = str(FORMAT_VERSION[0]).encode()
_EXPERTS = pa.list_(pa.binary())
_SCHEMA = trajectory_schema()


def read_bytes(path: Path, *, verify: bool = False) -> bytes | None:
    """The bytes of a small file (of any, with ``verify``); None when it is a large one, to be read in parts.

    Raises:
        FileNotFoundError: it is not there.
        StorageError: it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as stream:
            if not verify and os.fstat(stream.fileno()).st_size > WHOLE_BYTES:
                return None
            return stream.readall()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error


def read_columns(path: Path, columns: Sequence[str], *, verify: bool = False) -> Any:
    """Columns of a file as a ``pyarrow.Table``, in the order of the schema; ``routed_experts`` as a list of binary.

    Raises:
        FileNotFoundError: it is not there.
        CorruptArtefactError: it is damaged, as far as was looked.
        FormatVersionError: written by a newer major version of the format.
        StorageError: it cannot be read.
    """
    return parse_columns(path, read_bytes(path, verify=verify), columns)


def parse_columns(path: Path, data: bytes | None, columns: Sequence[str]) -> Any:
    """As :func:`read_columns`, of a file whose content is ``data``; with None it is read in parts, from the disk."""
    wanted = _places(tuple(columns))
    try:
        if data is None:
            table = _read_parts(path, wanted)
        elif _has_its_digest(path, data):
            table = _parse(pa.py_buffer(data), wanted)
        else:
            table = None
        if table is not None and _is_as_expected(table, wanted):
            return _one_width(table)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError):
        pass  # the careful reader says what is wrong
    table = _one_width(read_table(path).select([FILE_COLUMNS[index] for index in wanted]))
    if data is not None:
        return table
    raise CorruptArtefactError(f"{path} could not be read in parts", mend="give the same command with --verify")


@cache
def _places(columns: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(FILE_COLUMNS.index(name) for name in columns))


@cache
def _expected(wanted: tuple[int, ...]) -> Any:
    return pa.schema([_SCHEMA.field(index) for index in wanted])


def _has_its_digest(path: Path, data: bytes) -> bool:
    return path.name[: -len(".arrow")].endswith(digest_bytes(data).partition(":")[2][:TAG_DIGITS])


def _parse(source: Any, wanted: Sequence[int]) -> Any:
    options = pa.ipc.IpcReadOptions(included_fields=list(wanted), use_threads=False)
    with pa.ipc.open_file(source, options=options) as reader:
        return reader.read_all()


def _read_parts(path: Path, wanted: Sequence[int]) -> Any:
    with pa.OSFile(str(path), "rb") as source:
        table = _parse(source, wanted)
    table.validate(full=True)
    return table


def _is_as_expected(table: Any, wanted: tuple[int, ...]) -> bool:
    schema = table.schema
    major = (schema.metadata or {}).get(KEY_FORMAT, b"").partition(b".")[0]
    if major != _MAJOR or len(schema.names) != len(wanted):
        return False
    if schema.equals(_expected(wanted)):  # of most files: one call instead of some for each column
        return True
    for found, index in zip(schema, wanted, strict=True):
        expected = _SCHEMA.field(index)
        if found.name != expected.name or (found.type != expected.type and found.name != "routed_experts"):
            return False
    return True


def _one_width(table: Any) -> Any:
    """Widths of expert bytes may differ from file to file: one that holds only failed episodes has the least."""
    index = table.schema.get_field_index("routed_experts")
    if index < 0:
        return table
    return table.set_column(index, "routed_experts", table.column(index).cast(_EXPERTS))
