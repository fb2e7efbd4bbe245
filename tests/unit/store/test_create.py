"""A run directory comes into being with one commit, and is only opened when it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import flip, make_incarnation, make_layout, make_recipe, make_run, past_incarnation

from milesbatch.errors import CorruptArtefactError, InputError, RunHeldError, RunMismatchError
from milesbatch.recipe.load import recipe_digest
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.durable import create_exclusively
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run, read_run_record


def test_a_run_exists_from_its_commit_on(tmp_path: Path) -> None:
    layout, recipe = RunLayout(tmp_path / "run"), make_recipe()
    lay_out(layout, recipe)
    (layout.model / "tokenizer").mkdir()
    (layout.model / "tokenizer" / "vocab.json").write_bytes(b"{}")
    assert read_run_record(layout) is None
    record = commit_run(layout, recipe, {"model": "m"})
    assert read_run_record(layout) == record
    assert record.run_id.startswith("small-")
    assert record.recipe_digest == recipe_digest(recipe)
    assert [ref.path for ref in record.files] == ["recipe.yaml", "model/tokenizer/vocab.json"]
    with pytest.raises(RunHeldError):
        commit_run(layout, recipe, {"model": "m"})
    assert read_run_record(layout) == record


def test_a_start_that_died_is_begun_again_even_with_another_recipe(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    for recipe in (make_recipe(), make_recipe(), make_recipe(steps=99)):
        lay_out(layout, recipe)
    commit_run(layout, make_recipe(steps=99), {})
    create_exclusively(layout.incarnation(1), make_incarnation(1).to_bytes())
    assert open_run(layout, 1).recipe == make_recipe(steps=99)


def test_somebody_elses_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        lay_out(RunLayout(tmp_path), make_recipe())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="is a file"):
        lay_out(RunLayout(tmp_path / "thesis.tex"), make_recipe())


def test_hidden_files_are_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".nfs0001").write_text("x")
    lay_out(RunLayout(tmp_path), make_recipe())


def test_an_incarnation_runs_with_its_changes(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    for number, changes in ((1, {}), (2, {"steps": 12, "checkpoint.every": 3})):
        create_exclusively(layout.incarnation(number), make_incarnation(number, recipe_changes=changes).to_bytes())
    assert open_run(layout, 1).recipe == make_recipe()
    assert open_run(layout, 2).recipe == make_recipe(steps=12, checkpoint={"every": 3})


def test_what_is_not_a_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run"):
        open_run(RunLayout(tmp_path / "none"), 1)
    layout = make_run(tmp_path / "run")
    with pytest.raises(CorruptArtefactError, match=r"000001\.json is missing"):
        open_run(layout, 1)


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml", "incarnations/000001.json"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    layout = make_run(tmp_path / "run")
    create_exclusively(layout.incarnation(1), make_incarnation(1).to_bytes())
    open_run(layout, 1)
    flip(layout.root / name, 30, 0x01)
    with pytest.raises(CorruptArtefactError, match=name):
        open_run(layout, 1)


def test_a_run_without_its_record_is_not_the_beginning_of_one(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    past_incarnation(layout)
    layout.run_record.unlink(missing_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunMismatchError, match=r"run\.json is missing") as caught:
        lay_out(layout, make_recipe(seed=99))
    assert caught.value.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_of_two_first_starts_the_second_is_told_to_wait(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    lay_out(layout, make_recipe())
    commit_run(layout, make_recipe(), {})
    with pytest.raises(RunHeldError, match="at the same time") as caught:
        commit_run(layout, make_recipe(), {})
    assert caught.value.exit_code == 75
