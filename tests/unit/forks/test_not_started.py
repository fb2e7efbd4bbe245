"""A fork that was made, of which no run was made yet: what commands say of it, and damage in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from audit_runs import edit
from builders import past_incarnation
from forked_runs import begin_run, fork_recipe, make_fork, spoil
from typer.testing import CliRunner

from milesbatch.catalogue.entry import read_entry
from milesbatch.cli.main import app
from milesbatch.cli.runs import find_run, find_submitted
from milesbatch.controller.opening import check_beginning
from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.recipe.load import dump_recipe
from milesbatch.store.layout import RunLayout


@pytest.fixture
def made(original: RunLayout, tmp_path: Path) -> RunLayout:
    make_fork(original, tmp_path / "new")
    return RunLayout(tmp_path / "new")


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "watch",
        "audit",
        "report",
        "traj stats",
        "weights ls",
        "runs compare",
        "plan tiny --run",
        "logs",
        "cancel",
    ],
)
def test_a_command_says_that_it_was_not_started_and_what_starts_it(made: RunLayout, command: str) -> None:
    ended = CliRunner().invoke(app, [*command.split(), *[str(made.root)] * (2 if command == "runs compare" else 1)])
    assert isinstance(ended.exception, InputError), ended.exception
    said = str(ended.exception)
    assert "is a fork that was made from step 6 of" in said and f"milesbatch run RECIPE --run-dir {made.root}" in said


def test_a_fork_of_it_says_so_too(made: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was not started yet"):
        make_fork(made, tmp_path / "second")
    assert not made.holds.exists()


def test_runs_ls_has_it(made: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILESBATCH_RUNS", str(tmp_path))
    monkeypatch.setenv("MILESBATCH_CACHE", str(tmp_path / "cache"))
    (entry,) = json.loads(CliRunner().invoke(app, ["runs", "ls", "--json"]).stdout)
    assert (entry["name"], entry["state"], entry["step"], entry["parent_step"]) == ("new", "forked", 6, 6)
    assert "--run-dir" in entry["cause"]
    submit(made)
    entry = read_entry(made)
    assert (entry.state, entry.cause, entry.step) == ("queued", None, 6)


def test_without_a_step_of_its_own_its_step_is_that_of_the_parent(made: RunLayout) -> None:
    begin_run(made)
    assert (read_entry(made).state, read_entry(made).step, read_entry(made).parent_step) == ("queued", 6, 6)
    past_incarnation(made)
    entry = read_entry(made)
    assert (entry.step, entry.steps) == (6, 12)


def submit(made: RunLayout) -> None:
    made.jobs.mkdir()
    (made.jobs / "recipe-0123456789ab.yaml").write_text(dump_recipe(fork_recipe()))


def test_one_that_was_submitted_waits_for_its_job(made: RunLayout) -> None:
    submit(made)
    assert find_submitted(str(made.root)) == made
    with pytest.raises(InputError, match="its job makes the run"):
        find_run(str(made.root))


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    "name",
    ["fork.json", "parent/recipe.yaml", "parent/run.json", "model/tokenizer.json", "checkpoints/000006/manifest.json"],
)
def test_damage_is_mended_by_forking_again(
    made: RunLayout, original: RunLayout, tmp_path: Path, name: str, is_gone: bool
) -> None:
    path = made.root / name
    path.unlink() if is_gone else spoil(path)
    wanted = rf"{name.rpartition('/')[2]}(.|\n)*remove {made.root} and fork again"
    with pytest.raises(CorruptArtefactError, match=wanted):
        check_beginning(made, fork_recipe())
    with pytest.raises(CorruptArtefactError, match=wanted):
        make_fork(original, made.root)
    with pytest.raises(CorruptArtefactError, match=wanted):
        find_run(str(made.root))
    submit(made)
    with pytest.raises(CorruptArtefactError, match=wanted):
        find_submitted(str(made.root))
    assert read_entry(made).state == "unreadable"


@pytest.mark.parametrize("place", ["checkpoints", "weights"])
def test_payload_that_is_not_there_is_found_before_a_run_is_made(made: RunLayout, place: str) -> None:
    payload = next(path for path in sorted((made.root / place).rglob("*")) if path.is_file() and path.suffix != ".json")
    data = payload.read_bytes()
    payload.unlink()
    with pytest.raises(CorruptArtefactError, match=rf"{payload.name} is missing"):
        check_beginning(made, fork_recipe())
    payload.write_bytes(data[:-1])
    with pytest.raises(CorruptArtefactError, match=rf"{payload.name} is damaged: it has {len(data) - 1} bytes"):
        check_beginning(made, fork_recipe())


def test_what_a_run_has_become_of_is_not_asked_any_more(made: RunLayout) -> None:
    begin_run(made)
    edit(made.parent_checkpoint, lambda body: body.update(step=5))
    assert find_run(str(made.root)) == made and check_beginning(made, fork_recipe()) is None
