"""``milesbatch recipes``: finding, showing and validating."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from milesbatch.cli import recipes
from milesbatch.errors import RecipeError
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.shipped import shipped_recipes

GOOD = (
    "# A small adder.\n# Needs: one core.\n# Tested: every commit.\n"
    "name: adder\nsteps: 3\nmodel: {kind: made}\ndata: {kind: arithmetic}\n"
)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "recipes"
    directory.mkdir()
    (directory / "adder.yaml").write_text(GOOD)
    (directory / "_base.yaml").write_text("steps: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "_directories", lambda: [Path("recipes")])
    return directory


def call(*arguments: str) -> Result:
    return CliRunner().invoke(recipes.app, list(arguments))


def test_ls_says_what_each_needs_and_how_far_it_is_tested(shipped: Path) -> None:
    (shipped / "plain.yaml").write_text(GOOD.partition("# Tested: every commit.\n")[2])
    adder, plain = json.loads(call("ls", "--json").stdout)
    assert (adder["name"], adder["about"], adder["needs"]) == ("adder", "A small adder.", "one core.")
    assert (adder["tested"], adder["error"]) == ("every commit.", None)
    assert plain["needs"] == "2 trainer ranks, 2 rollout workers, 4 CPU threads"
    assert "2 recipes" in call("ls").stdout


def test_ls_shows_the_rest_beside_a_broken_recipe(shipped: Path) -> None:
    (shipped / "bad.yaml").write_text("name: [\n")
    result = call("ls", "--json")
    assert result.exit_code == 1
    assert [bool(row["error"]) for row in json.loads(result.stdout)] == [False, True]
    assert "bad.yaml" in result.stderr


@pytest.mark.parametrize("name", ["adder", "adder.yaml", "recipes/adder.yaml"])
def test_show_prints_text_that_loads_as_the_same_recipe(shipped: Path, tmp_path: Path, name: str) -> None:
    result = call("show", name, "--set", "steps=9")
    assert result.exit_code == 0
    (tmp_path / "shown.yaml").write_text(result.stdout)
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe(shipped / "adder.yaml", ["steps=9"])
    assert json.loads(call("show", name, "--json").stdout)["steps"] == 3


def test_validate(shipped: Path) -> None:
    good = call("validate", "adder")
    assert good.exit_code == 0 and "is valid: adder, 3 steps" in good.stdout
    assert json.loads(call("validate", "adder", "--json").stdout)["ok"] is True
    bad = call("validate", "adder", "--set", "stepz=1", "--json")
    document = json.loads(bad.stdout)
    assert (bad.exit_code, document["ok"]) == (2, False)
    assert "did you mean `steps`?" in document["error"]
    assert isinstance(call("validate", "adder", "--set", "stepz=1").exception, RecipeError)


def test_an_unknown_name_gets_the_nearest(shipped: Path) -> None:
    error = call("show", "ader").exception
    assert isinstance(error, RecipeError)
    assert "there is no recipe ader; shipped recipes: adder" in str(error)


def test_shipped_recipes_are_found_beside_the_package_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    beside = shipped_recipes()
    assert list(recipes.shipped()) == sorted(p for p in beside.glob("*.yaml") if not p.name.startswith("_"))
