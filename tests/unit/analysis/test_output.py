"""Results as files: whole or not at all, never over anything, and read again by others as they were."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from milesbatch.analysis import output
from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.output import Format, format_of, write_batches
from milesbatch.analysis.plain import plain
from milesbatch.analysis.scan import COLUMNS, SCHEMA, TrajectoryScan
from milesbatch.errors import InputError, StorageError, StorageFullError, StorageReadOnlyError
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed


@pytest.fixture
def scan(varied: RunLayout) -> TrajectoryScan:
    return TrajectoryScan(count_groups(varied))


def write(scan: TrajectoryScan, path: Path, form: Format | None = None, **options: Any) -> int:
    return write_batches(path, format_of(path, form), SCHEMA, scan.batches(COLUMNS), **options)


def test_parquet_is_what_was_scanned(scan: TrajectoryScan, tmp_path: Path) -> None:
    assert write(scan, tmp_path / "x.parquet") == 24
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table.to_pylist() == scan.table(COLUMNS).to_pylist()


def test_json_lines_and_json_are_the_rows(scan: TrajectoryScan, tmp_path: Path) -> None:
    write(scan, tmp_path / "x.jsonl")
    write(scan, tmp_path / "x.json")
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert lines == json.loads((tmp_path / "x.json").read_text())
    assert len(lines) == 24 and list(lines[0]) == list(COLUMNS)
    assert lines[2]["rewards"] == {"answer": 0.5} and lines[2]["messages"][1] == {
        "role": "assistant", "content": "it is 2", "tool_calls": None, "tool_call_id": None,
    }  # fmt: skip
    assert lines[2]["started"] == "2026-03-01T12:00:00+00:00" and lines[-1]["step"] is None


def test_csv_has_nested_values_as_json(scan: TrajectoryScan, tmp_path: Path) -> None:
    write(scan, tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 24 and json.loads(rows[0]["tokens"]) == [5, 6, 10] and rows[0]["reason"] == ""


def test_a_directory_that_datasets_loads(scan: TrajectoryScan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(output, "_SHARD_BYTES", 1)
    batches = (batch.slice(start, 10) for batch in scan.batches(COLUMNS) for start in (0, 10, 20))
    assert write_batches(tmp_path / "set", Format.DATASETS, SCHEMA, batches) == 24
    assert sorted(path.name for path in (tmp_path / "set" / "data").iterdir()) == [
        f"train-{number:05d}.parquet" for number in range(3)
    ]
    loaded = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.num_rows == 24
    assert loaded[2]["rewards"] == [{"key": "answer", "value": 0.5}]
    expected = scan.table(COLUMNS).drop_columns(["rewards"]).to_pylist()
    assert loaded.remove_columns(["rewards"]).to_list() == expected


@pytest.mark.parametrize("form", list(Format))
def test_no_rows_make_a_readable_result(form: Format, tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert write_batches(path, form, SCHEMA, []) == 0
    if form is Format.JSON:
        assert json.loads(path.read_text()) == []
    if form is Format.PARQUET:
        assert parquet.read_table(path).num_rows == 0
    if form is Format.DATASETS:
        assert parquet.read_table(path / "data" / "train-00000.parquet").num_rows == 0


@pytest.mark.parametrize("form", list(Format))
def test_nothing_is_written_over_without_force(scan: TrajectoryScan, tmp_path: Path, form: Format) -> None:
    path = tmp_path / "x"
    write(scan, path, form)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="exists"):
        write(scan, path, form)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert write_batches(path, form, SCHEMA, [], force=True) == 0
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} != before
    assert {p.name for p in tmp_path.iterdir()} == {"x", "varied"}


def test_force_spares_what_it_did_not_write(scan: TrajectoryScan, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "README.md").write_text("my notes")
    for form in (Format.DATASETS, Format.PARQUET):
        with pytest.raises(InputError, match="did not write"):
            write(scan, home, form, force=True)
    write(scan, tmp_path / "set", Format.DATASETS)
    (tmp_path / "set" / "mine.txt").write_text("added later")
    with pytest.raises(InputError, match="did not write"):
        write(scan, tmp_path / "set", Format.DATASETS, force=True)
    with pytest.raises(InputError, match="is not what --force may replace"):
        write(scan, Path("/dev/null"), Format.JSONL, force=True)
    assert (home / "README.md").read_text() == "my notes"


class Full(Operations):
    """A disk that is full when data is made durable, or when a name is given."""

    def sync_file(self, path: Path, stream: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("form", [Format.PARQUET, Format.JSONL, Format.DATASETS])
def test_a_full_disk_is_said_and_leaves_nothing(scan: TrajectoryScan, tmp_path: Path, form: Format) -> None:
    with installed(Full()), pytest.raises(StorageFullError, match="no space or quota left"):
        write(scan, tmp_path / "x", form)
    assert list(tmp_path.iterdir()) == [scan.counted.layout.root]


def test_a_disk_that_fills_up_in_the_middle(scan: TrajectoryScan, tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        yield from scan.batches(COLUMNS)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for form in Format:
        with pytest.raises(StorageFullError, match=r"no space or quota left for .*/x\b"):
            write_batches(tmp_path / "x", form, SCHEMA, rows())
    assert list(tmp_path.iterdir()) == [scan.counted.layout.root]


def test_an_interrupt_leaves_nothing(scan: TrajectoryScan, tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        yield from scan.batches(COLUMNS)
        raise KeyboardInterrupt

    for form in Format:
        for force in (False, True):
            with pytest.raises(KeyboardInterrupt):
                write_batches(tmp_path / "x", form, SCHEMA, rows(), force=force)
    assert list(tmp_path.iterdir()) == [scan.counted.layout.root]


def test_places_that_cannot_be_written(scan: TrajectoryScan, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        write(scan, tmp_path / "no" / "such" / "x.parquet")

    class ReadOnly(Operations):
        def create(self, path: Path) -> Any:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        def make_directory(self, path: Path) -> None:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with installed(ReadOnly()):
        for form in (Format.PARQUET, Format.DATASETS):
            with pytest.raises(StorageReadOnlyError):
                write(scan, tmp_path / "x", form)


def test_a_name_says_the_format_or_is_refused() -> None:
    assert format_of(Path("a.PARQUET"), None) is Format.PARQUET
    assert format_of(Path("a.txt"), Format.CSV) is Format.CSV
    with pytest.raises(InputError, match="does not say by its suffix"):
        format_of(Path("a.xlsx"), None)


def test_plain_values() -> None:
    from datetime import UTC, date, datetime, timedelta
    from decimal import Decimal
    from uuid import UUID

    values = [
        (float("nan"), None), (float("-inf"), None), (1.5, 1.5), (b"\x00\xff", "00ff"), (Decimal("3"), 3),
        (Decimal("3.5"), 3.5), (Decimal("NaN"), None), (date(2026, 1, 2), "2026-01-02"), (timedelta(hours=1), 3600.0),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"), ({"a": [float("nan")]}, {"a": [None]}),
        (UUID(int=1), str(UUID(int=1))), (True, True), (None, None),
    ]  # fmt: skip
    assert [plain(value) for value, _ in values] == [expected for _, expected in values]


def test_text_that_is_not_utf8_is_still_written(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("a", pa.string())])
    batch = pa.RecordBatch.from_pylist([{"a": 'tab\tquote"line\nend'}], schema=schema)
    for form in (Format.CSV, Format.JSONL, Format.JSON):
        path = tmp_path / form
        assert write_batches(path, form, schema, [batch]) == 1
    with open(tmp_path / "csv", newline="") as stream:
        assert list(csv.reader(stream)) == [["a"], ['tab\tquote"line\nend']]
