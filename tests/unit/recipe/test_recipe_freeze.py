"""What may change in a frozen recipe, and that the generated page follows the models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from milesbatch.controller.opening import check_same_recipe
from milesbatch.errors import RecipeError
from milesbatch.recipe.document import main, page
from milesbatch.recipe.fields import kinds_of
from milesbatch.recipe.freeze import ABSENT, MAY_CHANGE, Change, changed_keys, with_changes
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.layout import RunLayout

REPOSITORY = Path(__file__).parents[3]
BASE = "name: base\nsteps: 3\nmodel: {kind: made}\ndata: {kind: reasoning_gym, task: t, options: {a: 1}}\n"
ASKED = "evaluation={prompts: {kind: arithmetic, max_operand: 50}, num_prompts: 4}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return path


def changes(path: Path, *overrides: str, both: tuple[str, ...] = ()) -> list[Change]:
    return changed_keys(load_recipe(path, both), load_recipe(path, (*both, *overrides)))


def test_equal_recipes_have_no_changes(recipe: Path) -> None:
    assert changes(recipe) == []


@pytest.mark.parametrize(
    "override",
    [
        "steps=9",
        "checkpoint.every=3",
        "checkpoint.on_divergence=adopt",
        "slurm.hang_s=9",
        "tracking.kind=none",
        "rollout.workers=5",
        "rollout.lease_s=9",
        "environment.max_failed_share=0.5",
        "environment.failed_window=9",
        "evaluation.every_steps=3",
    ],
)
def test_what_cannot_alter_a_recorded_step_may_change(recipe: Path, override: str) -> None:
    (change,) = changes(recipe, override, both=(ASKED,))
    assert change.path == override.partition("=")[0]
    assert change.may_change


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "seed=1",
        "determinism=relaxed",
        "model.layers=1",
        "data.options.a=2",
        "environment.reward=a:b",
        "rollout.staleness=2",
        "rollout.samples_per_group=4",
        "rollout.sampling.top_k=3",
        "trainer.ranks=1",
        "trainer.optimizer.learning_rate=1",
        "algorithm.clip_low=0.1",
        "weights.keyframe_every=3",
    ],
)
def test_what_shapes_steps_may_not_change(recipe: Path, override: str) -> None:
    (change,) = changes(recipe, override)
    assert not change.may_change
    assert "may not change" in str(change)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_steps_may_not_change_under_a_schedule_that_depends_on_them(recipe: Path, schedule: str) -> None:
    (change,) = changes(recipe, "steps=9", both=(f"trainer.optimizer.schedule={schedule}",))
    assert (change.path, change.old, change.new, change.may_change) == ("steps", 3, 9, False)
    with_schedule = changes(recipe, "steps=9", f"trainer.optimizer.schedule={schedule}")
    assert not any(change.may_change for change in with_schedule)


def test_another_kind_lists_the_fields_of_both(recipe: Path) -> None:
    found = {c.path: (c.old, c.new) for c in changes(recipe, "model={kind: pretrained, path: m}")}
    assert found["model.kind"] == ("made", "pretrained")
    assert found["model.path"] == (ABSENT, "m")
    assert found["model.layers"][1] is ABSENT
    assert {c.path for c in changes(recipe, "data.options={}")} == {"data.options.a", "data.options"}


def test_every_name_in_the_list_exists() -> None:
    names = set(_paths(Recipe))
    for name in MAY_CHANGE:
        assert name.rstrip(".") in names, name


def test_changes_can_be_put_on_the_frozen_recipe(recipe: Path) -> None:
    frozen = load_recipe(recipe)
    new = load_recipe(recipe, ["steps=9", "slurm.hang_s=1e-3", "tracking.experiment='a: b'"])
    taken = {change.path: change.new for change in changed_keys(frozen, new)}
    assert with_changes(frozen, taken) == new
    assert with_changes(frozen, {}) == frozen
    with pytest.raises(RecipeError, match=r"steps .*found 0"):
        with_changes(frozen, {"steps": 0})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("evaluation=null", ASKED),
        (ASKED, "evaluation=null"),
        (ASKED, "evaluation={prompts: {kind: file, path: held-out.jsonl}}"),
        ("evaluation={prompts: {kind: file, path: held-out.jsonl}}", ASKED),
    ],
)
def test_evaluation_may_come_go_and_ask_other_prompts(recipe: Path, before: str, after: str, tmp_path: Path) -> None:
    frozen, new = load_recipe(recipe, [before]), load_recipe(recipe, [after])
    layout = RunLayout(tmp_path / "run")
    lay_out(layout, frozen)
    record = commit_run(layout, frozen, {})
    changed = check_same_recipe(layout, record, new)
    assert changed and all(change.may_change for change in changed_keys(frozen, new))
    assert with_changes(frozen, json.loads(json.dumps(changed))) == new


# -- the generated page ---------------------------------------------------------------------------------------------


def test_the_page_in_the_repository_is_what_the_models_say() -> None:
    path = REPOSITORY / "docs" / "recipe.md"
    run = subprocess.run(
        [sys.executable, "-m", "milesbatch.recipe.document", "--check", str(path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_check_finds_a_stale_page_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.md"
    assert main(["--check", str(path)]) == 1
    assert not path.exists()
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    path.write_text(path.read_text().replace("at least 1", "at least 2", 1))
    assert main(["--check", str(path)]) == 1
    assert "at least 2" in capsys.readouterr().err


def test_the_page_names_every_field_and_its_smallest_recipe_loads(tmp_path: Path) -> None:
    text = page()
    for path in _paths(Recipe):
        assert f"| `{path.rpartition('.')[2]}` |" in text, path
    (tmp_path / "smallest.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    assert load_recipe(tmp_path / "smallest.yaml").name == "adder"


def test_every_field_is_described_by_a_sentence() -> None:
    for path, description in _descriptions(Recipe):
        assert path.endswith("kind") or (len(description) > 10 and description.endswith(".")), path


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for path, _ in _descriptions(model, prefix):
        yield path


def _descriptions(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field.description or ""
        for member in kinds_of(field.annotation).values():
            yield from _descriptions(member, f"{prefix}{name}.")
