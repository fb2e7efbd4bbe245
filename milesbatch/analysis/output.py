"""Record batches as a file in a format that others read: Parquet, JSON lines, JSON, CSV, or a directory for
``datasets``.

Owns the formats and the way in which a result appears: whole, under its name, or not at all. Never writes over
anything unless told to, and never over a directory that it did not write. Invariant: memory does not grow with the
number of rows. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

import csv
import io
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from milesbatch.analysis.plain import plain_rows
from milesbatch.errors import InputError
from milesbatch.store.durable import TEMPORARY_PREFIX, make_directory, publishing, storage_error, sync_names, sync_tree
from milesbatch.store.operations import current

_SHARD_BYTES = 256 << 20
"""Of Arrow memory; as Parquet it is less."""
_CARD = "README.md"
_CARD_MARK = "Written by `milesbatch traj export`"


class Format(StrEnum):
    """What is written."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    DATASETS = "datasets"


_SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".json": Format.JSON,
    ".csv": Format.CSV,
}


def format_of(path: Path, asked: Format | None) -> Format:
    """The format that was asked for, else the one that the suffix of ``path`` says.

    Raises:
        InputError: it says none.
    """
    found = asked or _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise InputError(
            f"{path} does not say by its suffix what to write",
            mend=f"use one of {', '.join(_SUFFIXES)}, or give --format ({', '.join(Format)})",
        )
    return found


def check_free(path: Path, form: Format, *, force: bool) -> None:
    """Accept a place for the result, before the work is done.

    Raises:
        InputError: something is there, and ``force`` is not given or cannot be right.
        StorageError: it cannot be looked at.
    """
    try:
        exists, is_directory = path.exists() or path.is_symlink(), path.is_dir()
    except OSError as error:
        raise storage_error(path, error) from error
    if not exists:
        return
    if not force:
        raise InputError(f"{path} exists", mend="choose another name, or give --force to replace it")
    if is_directory and not (form is Format.DATASETS and _is_ours(path)):
        raise InputError(f"{path} is a directory that this command did not write", mend="choose another name")
    if not is_directory and (form is Format.DATASETS or not path.is_file()):
        raise InputError(f"{path} is not what --force may replace with {form}", mend="choose another name")


def write_batches(
    path: Path, form: Format, schema: Any, batches: Iterable[Any], *, force: bool = False, title: str = ""
) -> int:
    """Write ``batches`` of ``schema`` as ``path``; returns the number of rows.

    Durability: on return the result is durable and visible; if it ends midway nothing is under that name, only a
    ``.tmp-*`` beside it if the process was killed. With ``force`` a directory is exchanged in two steps: killed
    between them, neither is there under its name.

    Raises:
        InputError: as :func:`check_free`.
        StorageError: it cannot be written; nothing was.
    """
    check_free(path, form, force=force)
    if form is Format.DATASETS:
        with _new_directory(path) as directory:
            return _write_datasets(directory, schema, batches, title or path.name)
    with _new_file(path, force=force) as stream:
        return _WRITERS[form](stream, schema, batches)


@contextmanager
def _new_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    name = f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}"[:200] if force else path.name
    with publishing(path.parent, name) as file:
        yield file.stream
    if force:
        try:
            current().replace(path.parent / name, path)
        except OSError as error:
            with suppress(OSError):
                current().unlink(path.parent / name)
            raise storage_error(path, error) from error
        sync_names(path.parent)


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}"
    make_directory(temporary)
    try:
        yield temporary
        sync_tree(temporary)
        if path.exists():  # checked: an earlier result of this command
            old = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}"
            current().rename(path, old)
            current().rename(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            current().rename(temporary, path)
        sync_names(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    try:
        has_card = _CARD_MARK in (path / _CARD).read_text(encoding="utf-8", errors="replace")
        return has_card and {entry.name for entry in path.iterdir()} == {_CARD, "data"}
    except OSError:
        return False


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_parquet(stream: Any, schema: Any, batches: Iterable[Any]) -> int:
    import pyarrow.parquet as parquet

    rows = 0
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _write_jsonl(stream: Any, schema: Any, batches: Iterable[Any]) -> int:
    rows = 0
    for row in plain_rows(batches):
        stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n")
        rows += 1
    return rows


def _write_json(stream: Any, schema: Any, batches: Iterable[Any]) -> int:
    rows = 0
    stream.write(b"[")
    for row in plain_rows(batches):
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        stream.write((b",\n" if rows else b"\n") + text.encode("utf-8", "backslashreplace"))
        rows += 1
    stream.write(b"\n]\n" if rows else b"]\n")
    return rows


def _write_csv(stream: Any, schema: Any, batches: Iterable[Any]) -> int:
    """Nested values as JSON text; null is an empty field."""
    rows = 0
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(schema.names)
    for row in plain_rows(batches):
        writer.writerow([json.dumps(v, ensure_ascii=False) if isinstance(v, list | dict) else v for v in row.values()])
        rows += 1
    text.detach()
    return rows


_WRITERS: dict[Format, Callable[[Any, Any, Iterable[Any]], int]] = {
    Format.PARQUET: _write_parquet,
    Format.JSONL: _write_jsonl,
    Format.JSON: _write_json,
    Format.CSV: _write_csv,
}


def write_text(form: Format, stream: BinaryIO, schema: Any, batches: Iterable[Any]) -> int:
    """Write one of the formats to an open binary stream, such as standard output; returns the number of rows."""
    return _WRITERS[form](stream, schema, batches)


def _write_datasets(directory: Path, schema: Any, batches: Iterable[Any], title: str) -> int:
    """Parquet shards and a card: what ``datasets.load_dataset(directory)`` reads, and what the Hub holds."""
    make_directory(directory / "data")
    portable = pa.schema([pa.field(field.name, _portable(field.type)) for field in schema])
    rows = 0
    for number, shard in enumerate(_shards(portable, batches)):
        with open(directory / "data" / f"train-{number:05d}.parquet", "wb") as stream:
            rows += _write_parquet(stream, portable, shard)
    (directory / _CARD).write_text(_card(title, rows), encoding="utf-8")
    return rows


def _portable(of: Any) -> Any:
    """``datasets`` has no maps; a list of (key, value) is what Parquet stores for one."""
    if pa.types.is_map(of):
        return pa.list_(pa.struct([pa.field("key", of.key_type), pa.field("value", of.item_type)]))
    return of


def _cast(batch: Any, schema: Any) -> Any:
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        if pa.types.is_map(column.type):
            pairs = pa.StructArray.from_arrays([column.keys, column.items], fields=list(field.type.value_type))
            column = pa.ListArray.from_arrays(column.offsets, pairs, type=field.type)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _shards(schema: Any, batches: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """The batches in runs of about ``_SHARD_BYTES``; at least one run, which may be empty."""
    source = iter(batches)
    waiting: list[Any] = []

    def one() -> Iterator[Any]:
        size = 0
        while size < _SHARD_BYTES:
            batch = waiting.pop() if waiting else next(source, None)
            if batch is None:
                return
            yield _cast(batch, schema)
            size += batch.nbytes

    yield one()
    while (batch := next(source, None)) is not None:
        waiting.append(batch)
        yield one()


def _card(title: str, rows: int) -> str:
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

# {title}

{_CARD_MARK}: {rows:,} trajectories of a reinforcement learning run, one row each. `datasets.load_dataset` reads this directory.
"""
