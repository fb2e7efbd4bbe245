"""``milesbatch traj sql | find | diff | export | rescore`` as a user meets them."""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from builders import commit_batch, evaluate_version, flip, make_run, past_incarnation, write_groups
from typer.testing import CliRunner, Result

from milesbatch.cli import traj
from milesbatch.errors import InputError, StorageError, UsageError
from milesbatch.store.layout import RunLayout

STEPS = 3


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """Three steps of two groups of two samples, the last group waiting."""
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    for step in range(1, STEPS + 1):
        refs = write_groups(layout, [2 * step - 2, 2 * step - 1], version=step - 1)
        commit_batch(layout, step, refs)
    write_groups(layout, [6])
    return layout


def call(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(traj.app, [str(argument) for argument in arguments], input=stdin)


def fails(kind: type[Exception], match: str, *arguments: object) -> None:
    result = call(*arguments)
    assert result.exception is not None
    with pytest.raises(kind, match=match):
        raise result.exception


def flat(text: str) -> str:
    return " ".join(text.split())


BY_STEP = (
    "select step, count(*) as n, avg(reward) as reward from trajectories where step > 0 group by step order by step"
)


# -- evaluations ------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_read_like_trajectories_and_not_among_them(run: RunLayout, tmp_path: Path) -> None:
    before = json.loads(call("stats", run.root, "--overall", "--json").stdout)
    evaluate_version(run, 2, (1.0, 0.0, 0.5))
    assert json.loads(call("stats", run.root, "--overall", "--json").stdout) == before
    whole = json.loads(call("stats", run.root, "--evaluation", 2, "--json").stdout)
    assert (whole["trajectories"], whole["reward"]["mean"]) == (3, 0.5)
    shown = call("show", run.root, 1, "--evaluation", 2, "--colour", "none").stdout
    assert "evaluation of policy version 2" in flat(shown) and "pending" not in shown
    best = json.loads(call("show", run.root, "--best", 1, "--evaluation", 2, "--json").stdout)
    assert [(one["group_id"], one["sample"]["reward"]) for one in best] == [(0, 1.0)]
    found = json.loads(call("find", run.root, "reward > 0.2", "--evaluation", 2, "--json").stdout)
    assert found["found"] == 2
    query = "select version, prompts, reward_mean from evaluations"
    assert json.loads(call("sql", run.root, query, "--json").stdout) == [
        {"version": 2, "prompts": 3, "reward_mean": 0.5}
    ]
    assert call("export", run.root, "-o", tmp_path / "e.parquet", "--evaluation", 2).exit_code == 0
    assert parquet.read_table(tmp_path / "e.parquet").num_rows == 3
    fails(InputError, "policy version 3 .* has not been evaluated", "stats", run.root, "--evaluation", 3)


# -- sql --------------------------------------------------------------------------------------------------------------


def test_sql_in_its_forms(run: RunLayout, tmp_path: Path) -> None:
    expected = [{"step": step, "n": 4, "reward": 0.5} for step in (1, 2, 3)]
    result = call("sql", run.root, BY_STEP, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, expected)
    assert json.loads(call("sql", run.root, "-", "--json", stdin=BY_STEP).stdout) == expected
    rows = list(csv.DictReader(io.StringIO(call("sql", run.root, BY_STEP, "--csv").stdout)))
    assert rows == [{"step": str(step), "n": "4", "reward": "0.5"} for step in (1, 2, 3)]
    assert "3 rows" in call("sql", run.root, BY_STEP).stdout
    assert call("sql", run.root, BY_STEP, "-o", tmp_path / "x.parquet").stderr.startswith("3 rows in ")
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() == expected


def test_sql_on_the_terminal_says_that_there_is_more(run: RunLayout) -> None:
    shown = call("sql", run.root, "select group_id from trajectories", "--rows", 5).stdout
    assert "the first 5 rows; more with --rows N" in flat(shown)
    assert json.loads(call("sql", run.root, "select 1 where false", "--json").stdout) == []
    assert "0 rows" in call("sql", run.root, "select 1 where false").stdout


def test_sql_lets_no_control_sequence_through(run: RunLayout) -> None:
    shown = call("sql", run.root, "select chr(27) || '[31mred' as \"a\u202eb\"").stdout
    assert "\x1b" not in shown and "\u202e" not in shown and "\\x1b[31mred" in shown


def test_sql_errors(run: RunLayout, tmp_path: Path) -> None:
    fails(InputError, "at line 1, column 8", "sql", run.root, "select nothing from trajectories", "--json")
    fails(UsageError, "one of --json, --csv and -o", "sql", run.root, "select 1", "--json", "--csv")
    fails(InputError, "there is no run", "sql", tmp_path / "nowhere", "select 1")
    fails(InputError, "does not say by its suffix", "sql", run.root, "select 1", "-o", tmp_path / "x")
    (tmp_path / "x.csv").write_text("mine")
    fails(InputError, "exists", "sql", run.root, "select 1", "-o", tmp_path / "x.csv")
    fails(StorageError, "No such file", "sql", run.root, "select 1", "-o", tmp_path / "no" / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "mine"


def test_sql_tells_of_damage_and_answers_from_the_rest(run: RunLayout) -> None:
    flip(next(run.trajectories.glob("000002-*")), 99)
    result = call("sql", run.root, "select count(*) as n from trajectories", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [{"n": 10}])
    assert "is damaged" in result.stderr


def test_a_run_in_the_middle_of_writing(run: RunLayout) -> None:
    """Files and records appear while it is asked, again and again: no answer is wrong, none is an error."""
    stop = threading.Event()
    recorded = [STEPS]

    def write() -> None:
        while not stop.is_set() and recorded[0] < 40:
            step = recorded[0] + 1
            (run.trajectories / f".tmp-{step}").write_bytes(b"half a file")
            commit_batch(run, step, write_groups(run, [100 + 2 * step, 101 + 2 * step], version=step - 1))
            recorded[0] = step

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(6):
            least = recorded[0]
            distinct = "count(distinct (group_id, sample_index)) as d"
            query = f"select count(*) as n, {distinct} from trajectories where fate = 'trained'"
            result = call("sql", run.root, query, "--json")
            (row,) = json.loads(result.stdout)
            assert result.exit_code == 0, result.stderr
            assert row["n"] == row["d"] and 4 * least <= row["n"] <= 4 * recorded[0] + 4
    finally:
        stop.set()
        writer.join()


# -- find -------------------------------------------------------------------------------------------------------------


def test_find(run: RunLayout) -> None:
    result = call("find", run.root, "reward = 1 and fate = 'trained'", "--limit", 2, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["found"]) == (0, 6)
    assert [(row["group_id"], row["sample_index"], row["response"]) for row in document["trajectories"]] == [
        (0, 1, "2"),
        (1, 1, "2"),
    ]
    shown = flat(call("find", run.root, "reward = 1", "--limit", 2, "--by", "group_id desc").stdout)
    assert "7 trajectories, the first 2 of them" in shown
    assert "0 trajectories" in flat(call("find", run.root, "false").stdout)
    whole = call("find", run.root, "step = 2", "--show", "--limit", 1).stdout
    assert "group 2, sample 0, trained(2)" in whole and "1 of 4" in whole


def test_find_errors_keep_the_place_of_what_was_typed(run: RunLayout) -> None:
    fails(InputError, "at line 1, column 1: .*nonsense", "find", run.root, "nonsense = 1")
    fails(InputError, "cannot be answered", "find", run.root, "reward = 1) union select (1")
    fails(InputError, "one query is needed", "find", run.root, "true); select (1")


# -- diff -------------------------------------------------------------------------------------------------------------


def test_diff_of_a_run_and_its_copy_says_that_tokens_are_equal(run: RunLayout, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.root, tmp_path / "copy"))
    result = call("diff", run.root, copy)
    assert (result.exit_code, "tokens are equal in all 14 samples" in result.stdout) == (0, True)
    document = json.loads(call("diff", run.root, copy, "--json").stdout)
    assert (document["equal"], document["changes"], document["common_prompts"]) == (True, [], 7)


def test_diff_shows_texts_side_by_side(run: RunLayout, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    past_incarnation(other)
    from milesbatch.trajectories.trajectory import Message

    changed: dict[str, Any] = {
        "reward": 0.75,
        "messages": (Message("user", "1+1="), Message("assistant", "2 \x1b[1m!")),
    }
    commit_batch(other, 1, write_groups(other, [0, 1], **changed))
    result = call("diff", run.root, other.root, "--most", 1)
    shown = flat(result.stdout)
    assert "reward better in 2, worse in 0" in shown and "reward 0.500" in shown and "reward 0.750" in shown
    assert "\\x1b[1m!" in shown and "\x1b[1m!" not in result.stdout
    document = json.loads(call("diff", run.root, other.root, "--json").stdout)
    assert document["changes"][0]["texts"] == ["2", "2 \x1b[1m!"]


def test_diff_of_a_run_and_a_longer_one_says_that_the_common_part_is_equal(run: RunLayout, tmp_path: Path) -> None:
    copy = RunLayout(Path(shutil.copytree(run.root, tmp_path / "copy")))
    commit_batch(copy, 4, write_groups(copy, [50], version=3))
    assert "7 common prompts: tokens are equal in all 14 matched samples" in flat(
        call("diff", run.root, copy.root).stdout
    )


def test_diff_of_steps(run: RunLayout) -> None:
    document = json.loads(call("diff", run.root, "--steps", "1,3", "--json").stdout)
    assert (document["matched_by"], document["sides"][1]["label"]) == ("prompt tokens", f"{run.root}, step 3")
    fails(UsageError, "nothing to compare", "diff", run.root)
    fails(UsageError, "nothing to compare", "diff", run.root, "--steps", "2")
    fails(UsageError, "--steps is", "diff", run.root, "--steps", "a,b")
    fails(InputError, "no trajectory counts for that step", "diff", run.root, "--steps", "1,9")


# -- export -----------------------------------------------------------------------------------------------------------


def test_export_chooses_rows_and_columns(run: RunLayout, tmp_path: Path) -> None:
    options = ("--columns", "step,reward", "--steps", "1,3-9", "--fate", "trained")
    result = call("export", run.root, "-o", tmp_path / "x.jsonl", *options)
    assert (result.exit_code, result.stdout) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 4 + [3] * 4 and list(rows[0]) == ["step", "reward"]
    call("export", run.root, "-o", tmp_path / "pending.jsonl", "--fate", "pending")
    assert len((tmp_path / "pending.jsonl").read_text().splitlines()) == 2
    assert call("export", run.root, "-o", tmp_path / "set", "--format", "datasets").exit_code == 0
    assert (tmp_path / "set" / "data" / "train-00000.parquet").exists()


def test_export_refuses_before_it_reads(run: RunLayout, tmp_path: Path) -> None:
    fails(UsageError, "--columns names colour", "export", run.root, "-o", tmp_path / "x.csv", "--columns", "colour")
    fails(UsageError, "--steps is", "export", run.root, "-o", tmp_path / "x.csv", "--steps", "3-")
    (tmp_path / "x.csv").write_text("mine")
    fails(InputError, "exists", "export", run.root, "-o", tmp_path / "x.csv")
    assert call("export", run.root, "-o", tmp_path / "x.csv", "--force").exit_code == 0
    assert (tmp_path / "x.csv").read_text() != "mine"


def test_export_says_what_it_lacks(run: RunLayout, tmp_path: Path) -> None:
    flip(next(run.trajectories.glob("000002-*")), 99)
    result = call("export", run.root, "-o", tmp_path / "x.csv")
    assert result.exit_code == 1 and "lacks the trajectories of the files below" in result.stderr
    assert "12" not in result.stderr.split(" trajectories")[0] and (tmp_path / "x.csv").exists()


# -- rescore ----------------------------------------------------------------------------------------------------------


def test_rescore_exits_with_one_when_rewards_differ(run: RunLayout) -> None:
    result = call("rescore", run.root, "--all", "--most", 2, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["compared"], len(document["differences"])) == (1, 14, 2)
    assert document["differing"] > 0 and document["recorded_mean"] == 0.5
    shown = flat(call("rescore", run.root, "--sample", 4).stdout)
    assert "of 4 differ" in shown and "most different" in shown
    assert f"2 of {document['groups']} groups (drawn with seed 0; --all judges all of them), with 4 samples" in shown
    assert document["drawn"] == document["groups"] > 1
    assert f"{document['groups']} of {document['groups']} groups (all)" in flat(
        call("rescore", run.root, "--all").stdout
    )
    lenient = call("rescore", run.root, "--all", "--reward", "milesbatch.environments.rewards:digit_match")
    assert lenient.exit_code == 1


def test_what_is_written_to_is_never_the_run(run: RunLayout, tmp_path: Path) -> None:
    """None of the commands changes a byte of the run, and a folder without write permission is enough."""
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    for arguments in (
        ("ls",), ("show", 0), ("stats",), ("sql", BY_STEP), ("find", "true"), ("diff", "--steps", "1,2"),
        ("export", "-o", tmp_path / "x.parquet"), ("rescore",),
    ):  # fmt: skip
        call(arguments[0], run.root, *arguments[1:])
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before
    assert (tmp_path / "x.parquet").exists()
