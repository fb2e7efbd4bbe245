"""What is remembered of runs, and how it is kept, found and compared."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from builders import evaluate_version, make_run, past_incarnation
from typer.testing import CliRunner

from milesbatch.catalogue import book
from milesbatch.catalogue.book import Catalogue
from milesbatch.catalogue.compare import compare
from milesbatch.catalogue.entry import Entry, Start, entry_from_json, read_entry
from milesbatch.catalogue.search import find
from milesbatch.cli.main import app
from milesbatch.errors import UsageError
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout

A = Entry(
    path="/r/a",
    name="tiny",
    state="failed",
    cause="trainer-1 on n3 died: killed by SIGKILL, out of memory",
    failed_host="n3",
    created_at="2026-01-01T00:00:00Z",
    step=8,
    steps=80,
    reward_first=0.25,
    reward_last=0.5,
    starts=(Start(2, "a lost node", "2026-01-02T00:00:00Z", False, 20.5), Start(3, "by hand", "2026", True, None)),
    diagnosis_s=(3600.0,),
    recipe={"name": "tiny", "seed": 3, "determinism": "bitwise", "trainer.checkpointing": False, "data.path": None},
)
B = dataclasses.replace(
    A, path="/r/b", state="finished", cause=None, reward_last=0.9, recipe={**A.recipe, "name": "big", "seed": 4}
)


def step(log: EventLog, number: int, *, replayed: bool = False, **metrics: float) -> None:
    log.write(
        "train_step", step=number, replayed=replayed, weights_digest="x", metrics={"step": float(number), **metrics}
    )


def trained_run(place: Path) -> RunLayout:
    """Two incarnations: the first fails after step 3, the second replays step 3 and goes on."""
    layout = make_run(place)
    past_incarnation(layout)
    trainer, controller = EventLog(layout, "trainer-0", 1), EventLog(layout, "controller-0", 1)
    for number in (1, 2, 3):
        step(trainer, number, reward_mean=number / 10, lag_mean=1.0, samples=8.0, failed=1.0, tokens=100.0)
    controller.write("failed", error="the disk is full\n  more", exit_code=1)
    past_incarnation(layout)
    trainer = EventLog(layout, "trainer-0", 2)
    step(trainer, 3, replayed=True, reward_mean=0.3, lag_mean=1.0, samples=8.0, failed=1.0, tokens=100.0)
    step(trainer, 4, reward_mean=0.2, lag_mean=2.0, samples=8.0, failed=0.0, tokens=50.0)
    return layout


def test_what_is_read_from_a_run(tmp_path: Path) -> None:
    entry = read_entry(trained_run(tmp_path / "run"))
    assert (entry.step, entry.reward_best, entry.reward_best_step) == (4, 0.3, 3)
    assert (entry.reward_first, entry.reward_last) == (0.15, 0.25)
    assert (entry.failed_share, entry.tokens, entry.lag_mean) == (3 / 32, 350, 1.25)
    assert entry.replayed_steps == 1
    assert entry.recovered == 1 and entry.starts[0].seconds_to_step is not None
    assert len(entry.diagnosis_s) == 1
    assert entry.rejected_groups is None, "nothing is behind it"
    assert entry.recipe["trainer.groups_per_step"] >= 1
    assert entry_from_json(json.loads(json.dumps(entry.to_json()))) == entry


def test_evaluations_are_remembered_found_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = trained_run(tmp_path / "runs" / "asked")
    trained_run(tmp_path / "runs" / "other")
    monkeypatch.setenv("MILESBATCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MILESBATCH_CACHE", str(tmp_path / "cache"))
    catalogue = Catalogue(tmp_path / "cache" / "catalogue.jsonl")
    assert {entry.evaluations for entry in catalogue.refresh([tmp_path / "runs"])} == {None}
    for version, rewards in ((0, (0.0, 0.0)), (2, (1.0, 0.5)), (4, (0.5, 0.5))):
        evaluate_version(layout, version, rewards)
    found = {entry.name: entry for entry in find(catalogue.refresh([tmp_path / "runs"]), ["eval_best>0.7"])}
    (entry,) = found.values()
    assert (entry.eval_last, entry.eval_last_version, entry.evaluations) == (0.5, 4, 3)
    assert (entry.eval_best, entry.eval_best_version) == (0.75, 2)
    assert compare([entry, B]).outcomes["eval_best"] == (0.75, None)
    text = CliRunner().invoke(app, ["runs", "ls"]).stdout
    assert "evaluation" in text and "0.500 (best 0.750)" in text
    none = CliRunner().invoke(app, ["runs", "find", "eval_best=null"]).stdout
    assert "evaluation" not in none


def test_damage_is_an_entry_that_says_why(tmp_path: Path) -> None:
    layout = trained_run(tmp_path / "run")
    layout.incarnation(1).write_text("{")
    entry = read_entry(layout)
    assert entry.state == "unreadable" and "000001.json" in str(entry.cause)


def test_a_bad_end_is_explained(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    EventLog(layout, "controller-0", 1).write("failed", error="no space or quota left for /x", exit_code=1)
    entry = read_entry(layout)
    assert (entry.state, entry.failed_process) == ("failed", "controller-0")
    assert entry.cause == "no space or quota left for /x" and "make room" in str(entry.remedy)


def test_only_changed_runs_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(layout: RunLayout) -> Entry:
        read.append(layout.root.name)
        return dataclasses.replace(read_entry(layout), state="stopped")

    monkeypatch.setattr(book, "read_entry", counted)
    first = trained_run(tmp_path / "runs" / "a")
    trained_run(tmp_path / "runs" / "b")
    catalogue = Catalogue(tmp_path / "cache" / "catalogue.jsonl")
    assert len(catalogue.refresh([tmp_path / "runs"])) == 2
    assert read == ["a", "b"]
    step(EventLog(first, "trainer-0", 2), 5, reward_mean=1.0)
    assert {entry.step for entry in catalogue.refresh([tmp_path / "runs"])} == {4, 5}
    assert read == ["a", "b", "a"]


def test_a_run_that_is_gone_is_remembered_until_a_rebuild(tmp_path: Path) -> None:
    trained_run(tmp_path / "runs" / "a")
    catalogue = Catalogue(tmp_path / "cache" / "catalogue.jsonl")
    (before,) = catalogue.refresh([tmp_path / "runs"])
    shutil.rmtree(tmp_path / "runs" / "a")
    assert catalogue.refresh([]) == [dataclasses.replace(before, state="gone")]
    assert catalogue.refresh([], rebuild=True) == []


@pytest.mark.parametrize("damage", [b"{", b"\xff\x00", b'{"stamp": 1, "entry": {"path": "/x"}}', b"[]\n3\nnull\n"])
def test_a_damaged_catalogue_is_made_again(tmp_path: Path, damage: bytes) -> None:
    trained_run(tmp_path / "runs" / "a")
    catalogue = Catalogue(tmp_path / "cache" / "catalogue.jsonl")
    entries = catalogue.refresh([tmp_path / "runs"])
    (tmp_path / "cache" / "catalogue.jsonl").write_bytes(damage)
    assert catalogue.refresh([tmp_path / "runs"]) == entries


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        (["tiny"], "ab"),
        (["SIGKILL"], "a"),
        (["state=failed"], "a"),
        (["state!=failed"], "b"),
        (["reward_last>0.5"], "b"),
        (["reward_last>=0.5", "recipe.seed=4"], "b"),
        (["cause~out of memory"], "a"),
        (["recipe.trainer.checkpointing=false"], "ab"),
        (["recipe.data.path=null"], "ab"),
        (["recovered=1"], "ab"),
        (["cause>3"], ""),
    ],
)
def test_finding(terms: list[str], found: str) -> None:
    assert "".join(entry.path[-1] for entry in find([A, B], terms)) == found


@pytest.mark.parametrize(
    ("term", "says"), [("rewrd_last>1", "reward_last"), ("recipe.sed=1", "recipe.seed"), ("step>many", "'many'")]
)
def test_a_condition_that_cannot_be_is_refused(term: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        find([A, B], [term])
    assert says in str(refused.value)


def test_comparing_shows_what_differs() -> None:
    found = compare([A, B])
    assert found.recipe == {"seed": (3, 4)}
    assert found.outcomes["reward_last"] == (0.5, 0.9)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILESBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MILESBATCH_RUNS", str(tmp_path / "runs"))
    trained_run(tmp_path / "runs" / "a")
    trained_run(tmp_path / "elsewhere" / "b")
    run = CliRunner().invoke
    listed = json.loads(run(app, ["runs", "ls", "--in", str(tmp_path / "elsewhere"), "--json"]).stdout)
    assert {Path(row["path"]).name for row in listed} == {"a", "b"}
    assert listed[0]["recovered"] == 1
    text = run(app, ["runs", "ls"]).stdout
    assert "4/" in text and "elsewhere/b" in text.replace("\n", "")
    assert json.loads(run(app, ["runs", "find", "step>9", "--json"]).stdout) == []
    compared = run(app, ["runs", "compare", str(tmp_path / "runs" / "a"), str(tmp_path / "elsewhere" / "b"), "--json"])
    assert json.loads(compared.stdout)["recipe"] == {}
    assert isinstance(run(app, ["runs", "compare", "a"]).exception, UsageError)
    assert isinstance(run(app, ["runs", "ls", "--in", str(tmp_path / "nowhere")]).exception, UsageError)
