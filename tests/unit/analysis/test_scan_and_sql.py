"""Scans of columns, the dataset that DuckDB sees, and SQL that can read and do nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from analysis_runs import write_file, write_samples
from builders import flip, make_run, make_trajectory, past_incarnation

from milesbatch.analysis import files as files_module
from milesbatch.analysis import scan as scan_module
from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.dataset import RunDataset
from milesbatch.analysis.scan import COLUMNS, SCHEMA, TrajectoryScan, causes
from milesbatch.analysis.sql import Tables, open_tables, where_query
from milesbatch.errors import FormatVersionError, InputError, UsageError
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.reader import read_table


def scan_of(layout: RunLayout, **options: Any) -> TrajectoryScan:
    return TrajectoryScan(count_groups(layout), **options)


@pytest.fixture
def tables(varied: RunLayout) -> Iterator[Tables]:
    with open_tables(scan_of(varied)) as opened:
        yield opened


def rows(tables: Tables, sql: str) -> list[dict[str, Any]]:
    return [row for batch in tables.batches(sql)[1] for row in batch.to_pylist()]


# -- scan -------------------------------------------------------------------------------------------------------------


def test_a_scan_gives_what_the_careful_reader_gives(varied: RunLayout) -> None:
    table = scan_of(varied).table(COLUMNS)
    assert table.schema == SCHEMA
    slow = pa.concat_tables([read_table(path) for path in sorted(varied.trajectories.glob("*.arrow"))])
    for name in slow.column_names:
        if name != "routed_experts":
            assert table[name].to_pylist() == slow[name].to_pylist(), name


def test_added_columns(varied: RunLayout) -> None:
    table = scan_of(varied).table(
        ["group_id", "step", "fate", "reason", "version_min", "version_max", "staleness", "cause"]
    )
    by_group = {row["group_id"]: row for row in table.to_pylist()}
    assert by_group[0] == {
        "group_id": 0, "step": 1, "fate": "trained", "reason": None, "version_min": 0, "version_max": 0, "staleness": 0,
        "cause": None,
    }  # fmt: skip
    assert (by_group[2]["fate"], by_group[2]["reason"], by_group[2]["step"]) == ("rejected", "stale", 1)
    assert (by_group[3]["staleness"], by_group[3]["cause"]) == (1, "ValueError: # is no '...' (/home/a/rewards.py:13)")
    assert (by_group[5]["fate"], by_group[5]["step"], by_group[5]["staleness"]) == ("pending", None, None)


def test_versions_of_samples_without_a_token(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    nothing: dict[str, Any] = {
        "tokens": (5, 6), "loss_mask": (False, False), "logprobs": (0.0, 0.0), "versions": (), "response_tokens": 0,
        "weights_digest": "",
    }  # fmt: skip
    write_samples(layout, [make_trajectory(0, 0, **nothing), make_trajectory(0, 1, version=3)])
    table = scan_of(layout).table(["version_min", "version_max"])
    assert table.to_pylist() == [{"version_min": None, "version_max": None}, {"version_min": 3, "version_max": 3}]


def test_causes_leave_out_what_differs() -> None:
    said = [
        "reward function a:b failed on prompt x-1: KeyError: 'foo 3' (/a/b.py:12)",
        'reward function a:b failed on prompt y: 2: KeyError: "bar" (/a/b.py:12)',
        "timed out after 3.5 s\nand more",
        None,
    ]
    assert causes(pa.array(said)).to_pylist() == [
        "KeyError: '...' (/a/b.py:12)",
        "#: KeyError: '...' (/a/b.py:12)",
        "timed out after # s",
        None,
    ]
    assert len(causes(pa.array(["x" * 5000]))[0].as_py()) == 160


def test_expert_bytes_of_different_widths_go_together(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    write_samples(layout, [make_trajectory(0, i, routed_experts=(b"abc",) * 5) for i in (0, 1)])
    write_samples(layout, [make_trajectory(1, i) for i in (0, 1)])
    assert scan_of(layout).table(["routed_experts"]).to_pylist() == [
        {"routed_experts": [b"abc"] * 5}, {"routed_experts": [b"abc"] * 5}, {"routed_experts": None},
        {"routed_experts": None},
    ]  # fmt: skip


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file were a large one."""
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)


@pytest.mark.usefixtures("in_parts")
def test_large_files_are_read_in_parts_and_with_verify_digested(varied: RunLayout) -> None:
    whole = scan_of(varied).table(COLUMNS)
    path = next(varied.trajectories.glob("000000-*"))
    flip(path, -3)  # in the last bytes, which are read whatever the columns are
    scan = scan_of(varied)
    assert scan.table(["reward"]).num_rows == whole.num_rows - 4
    assert "is damaged" in scan.errors[0].what
    flip(path, -3)
    flip(path, 300)
    checked = scan_of(varied, verify=True)
    assert checked.table(["reward"]).num_rows == whole.num_rows - 4
    assert "is damaged: expected" in checked.errors[0].what


@pytest.mark.usefixtures("in_parts")
def test_no_flipped_byte_of_a_large_file_can_do_more_than_change_values(varied: RunLayout) -> None:
    """Nothing is digested here: what Arrow cannot make sense of is an error, and the process lives."""
    path = next(varied.trajectories.glob("000000-*"))
    whole = path.read_bytes()
    for offset in range(8, len(whole), max(len(whole) // 150, 1)):
        data = bytearray(whole)
        data[offset] ^= 0xFF
        path.write_bytes(data)
        scan = scan_of(varied)
        number = scan.table(["reward", "messages", "versions"]).num_rows
        assert number == 24 or (number < 24 and scan.errors)


def test_a_newer_format_is_said_to_be_newer(varied: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("milesbatch.trajectories.schema.FORMAT_VERSION", (99, 0))
        write_file(varied, [make_trajectory(9, i) for i in (0, 1)])
    scan = scan_of(varied)
    assert isinstance(scan.errors[0], FormatVersionError)
    assert scan.table(["reward"]).num_rows == 24


def test_files_that_open_slowly_are_read_ahead_and_in_order(lives: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = scan_of(lives).table(["group_id", "file"])
    monkeypatch.setattr(scan_module, "_CHUNK_FILES", 2)
    monkeypatch.setattr(scan_module, "_SLOW_FILE_S", -1.0)
    threads: set[str] = set()
    read = scan_module.read_bytes

    def noted(path: Path, *, verify: bool) -> bytes | None:
        threads.add(threading.current_thread().name)
        return read(path, verify=verify)

    monkeypatch.setattr(scan_module, "read_bytes", noted)
    assert scan_of(lives).table(["group_id", "file"]) == quick
    assert len(threads) > 1


# -- dataset ----------------------------------------------------------------------------------------------------------


def test_the_dataset_reads_what_columns_and_filter_need(varied: RunLayout) -> None:
    dataset = RunDataset(scan_of(varied))
    found = dataset.to_table(columns=["reward"], filter=(pc.field("step") == 2) & (pc.field("sample_index") == 1))
    assert (found.column_names, found.num_rows) == (["reward"], 2)
    assert dataset.count_rows() == 24
    assert dataset.head(3, columns=["group_id"]).to_pydict() == {"group_id": [0, 0, 0]}


def test_a_filter_on_groups_leaves_files_out(varied: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = scan_of(varied)
    asked: list[Any] = []
    read = scan._read
    monkeypatch.setattr(scan, "_read", lambda columns, files: read(columns, asked.append(files) or files))
    dataset = RunDataset(scan)
    assert dataset.to_table(columns=["reward"], filter=pc.field("step") == 2).num_rows == 8
    assert dataset.to_table(columns=["reward"], filter=pc.field("step").is_null()).num_rows == 4
    assert dataset.to_table(columns=["reward"], filter=pc.field("reward") > 0.6).num_rows > 0
    assert [None if files is None else len(files) for files in asked] == [2, 1, None]


# -- SQL --------------------------------------------------------------------------------------------------------------


def test_tables(tables: Tables) -> None:
    assert rows(tables, "select count(*) as n, count(distinct group_id) as g from trajectories") == [{"n": 24, "g": 6}]
    assert rows(tables, "select fate, count(*) as n from groups group by fate order by fate") == [
        {"fate": "pending", "n": 1}, {"fate": "rejected", "n": 1}, {"fate": "trained", "n": 4},
    ]  # fmt: skip
    assert rows(tables, "select step, trained, rejected, year(created_at) as y from batches") == [
        {"step": 1, "trained": 2, "rejected": 1, "y": 2026}, {"step": 2, "trained": 2, "rejected": 0, "y": 2026},
    ]  # fmt: skip
    assert rows(tables, "select count(*) as n from files where uncounted is null") == [{"n": 6}]
    expected = {"trajectories", "groups", "batches", "files", "evaluations"}
    assert {row["name"] for row in rows(tables, "show tables")} == expected


def test_a_query_over_nested_columns(tables: Tables) -> None:
    query = "select rewards['answer'] as a, messages[-1].content as c, versions[1].version as v, tokens[3] as t"
    found = rows(tables, f"{query} from trajectories where group_id = 1 and sample_index = 2")
    assert found == [{"a": 0.5, "c": "it is 3", "v": 0, "t": 10}]


def test_a_join_of_the_table_with_itself(tables: Tables) -> None:
    query = "select count(*) as n from trajectories a join trajectories b using (group_id, sample_index)"
    assert rows(tables, query) == [{"n": 24}]


def test_columns_of_one_name_stay_apart(tables: Tables) -> None:
    assert rows(tables, "select 1 as a, 2 as a, 3 as a") == [{"a": 1, "a_2": 2, "a_3": 3}]


def test_every_column_is_described(tables: Tables) -> None:
    described = [row["column_name"] for row in rows(tables, "describe trajectories")]
    assert described == list(COLUMNS)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("selec 1", "at line 1, column 1: syntax error"),
        ("select foo from trajectories", 'at line 1, column 8: Referenced column "foo" not found'),
        ("select 1\nfrom trajectories\nwhere step = 'x'", "at line 3, column 14: Could not convert string 'x'"),
        ("select * from nowhere", "at line 1, column 15: Table with name nowhere does not exist"),
        ("select prompt_id::int from trajectories", "Could not convert string 'p0' to INT32"),
        ("select error('boo')", "boo"),
        ("select * from scan", "Table with name scan does not exist"),
    ],
)
def test_wrong_sql_is_explained_with_its_place(tables: Tables, sql: str, said: str) -> None:
    scan = "a variable that no query may see"
    assert scan
    with pytest.raises(InputError) as caught:
        rows(tables, sql)
    assert said in caught.value.what
    assert "tables: trajectories, groups, batches, files" in caught.value.mend


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{file}')",
        "select * from read_text('{file}')",
        "select * from read_blob('{file}')",
        "select * from read_parquet('{file}')",
        "select * from glob('/*')",
        "select * from '{file}'",
        "copy (select 1) to '{new}'",
        "copy trajectories from '{file}'",
        "attach '{new}' as x",
        "export database '{new}'",
        "install httpfs",
        "load httpfs",
        "set threads = 7",
        "set enable_external_access = true",
        "pragma enable_external_access = true",
        "reset memory_limit",
        "create table t as select 1",
        "insert into groups select * from groups",
        "drop view trajectories",
        "explain analyze copy (select 1) to '{new}'",
        "select 1; copy (select 1) to '{new}'",
        "call pragma_version()",
        "begin",
        "",
        "-- nothing",
        ";",
        "\x00",
        "select '\ud800'",
    ],
)
def test_a_query_reads_the_run_and_nothing_else(tables: Tables, tmp_path: Path, sql: str) -> None:
    file, new = tmp_path / "secret.csv", tmp_path / "new"
    file.write_text("a,b\n1,2\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError):
        rows(tables, sql.format(file=file, new=new))
    assert sorted(tmp_path.rglob("*")) == before
    assert rows(tables, "select count(*) as n from trajectories") == [{"n": 24}]


def test_a_condition_keeps_its_place_and_its_comment(tables: Tables) -> None:
    query, before = where_query("count(*) as n", "step = 2 -- the second")
    _, batches = tables.batches(query, line_offset=before)
    assert [row for batch in batches for row in batch.to_pylist()] == [{"n": 8}]
    query, before = where_query("1", "reward >\n 'x'")
    with pytest.raises(InputError, match="at line 2, column 2"):
        list(tables.batches(query, line_offset=before)[1])


def test_more_than_the_memory_is_spilled_and_cleaned_up(
    varied: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "spill"))
    (tmp_path / "spill").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    with open_tables(scan_of(varied), memory="60MB", threads=1) as tables:
        query = "select count(*) as n from (select hash(range)::varchar || repeat('x', 300) as s from range(300000) order by s)"
        assert rows(tables, query) == [{"n": 300_000}]
    assert list((tmp_path / "spill").iterdir()) == []
    with pytest.raises(InputError, match="not an amount of memory"), open_tables(scan_of(varied), memory="lots"):
        pass


def test_damage_is_told_after_a_query(varied: RunLayout) -> None:
    flip(next(varied.trajectories.glob("000001-*")), 100)
    scan = scan_of(varied)
    with open_tables(scan) as tables:
        assert rows(tables, "select count(*) as n from trajectories") == [{"n": 20}]
    assert len(scan.errors) == 1


def test_a_read_only_copy_can_be_asked(varied: RunLayout) -> None:
    places = [varied.root, *(path for path in varied.root.rglob("*") if path.is_dir())]
    for place in places:
        place.chmod(0o555)
    try:
        with open_tables(scan_of(varied)) as tables:
            assert rows(tables, "select count(*) as n from trajectories") == [{"n": 24}]
    finally:
        for place in places:
            place.chmod(0o755)


def test_without_duckdb_it_is_said_what_to_install(varied: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UsageError, match="SQL needs DuckDB"), open_tables(scan_of(varied)):
        pass


def test_nothing_of_this_needs_torch_or_duckdb_to_be_imported() -> None:
    code = (
        "import sys, milesbatch.cli.traj, milesbatch.analysis.sql, milesbatch.analysis.rescore\n"
        "assert not {'torch', 'transformers', 'duckdb', 'pandas', 'polars', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_positions_of_groups(lives: RunLayout) -> None:
    counted = count_groups(lives)
    assert counted.positions(np.array([0, 19, 20, -5])).tolist() == [0, 19, -1, -1]
