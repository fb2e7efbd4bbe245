"""Loading recipes: what is merged, what is set, and the sentence that each mistake gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from milesbatch.errors import EXIT_USAGE, RecipeError
from milesbatch.recipe.load import dump_recipe, load_recipe, recipe_digest
from milesbatch.recipe.models import ArithmeticData, FileData, MadeModel, PretrainedModel

BASE = "name: base\nsteps: 3\nmodel: {kind: made, layers: 3}\ndata: {kind: arithmetic, max_operand: 12}\n"


def write(directory: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


# -- what loads -----------------------------------------------------------------------------------------------------


def test_a_small_recipe_gets_every_default(tmp_path: Path) -> None:
    recipe = load_recipe(str(write(tmp_path, BASE)))
    assert isinstance(recipe.model, MadeModel)
    assert (recipe.name, recipe.steps, recipe.model.layers, recipe.trainer.ranks) == ("base", 3, 3, 2)


def test_dump_loads_as_an_equal_recipe_and_dumps_again_as_the_same_text(tmp_path: Path) -> None:
    text = (
        "name: '1e5'\nsteps: 3\nmodel: {kind: pretrained, path: '2024-01-01', system_prompt: \"a: b # c\\té\\n\"}\n"
        "data: {kind: reasoning_gym, task: '012', options: {b: 1e-4, a: [on, null, '1e3', '']}}\n"
        'rollout: {sampling: {stop: ["\\n", \'~\', "\\x1b"]}}\ntrainer: {optimizer: {learning_rate: 1e-5}}\n'
    )
    recipe = load_recipe(write(tmp_path, text))
    dumped = dump_recipe(recipe)
    again = load_recipe(write(tmp_path, dumped, "dumped.yaml"))
    assert again == recipe
    assert dump_recipe(again) == dumped
    assert recipe_digest(again) == recipe_digest(recipe)
    assert recipe.name == "1e5"


def test_the_digest_depends_on_values_only(tmp_path: Path) -> None:
    one = load_recipe(write(tmp_path, BASE))
    other = load_recipe(write(tmp_path, "# reordered\nseed: 0\n" + "\n".join(reversed(BASE.splitlines()))))
    assert recipe_digest(one) == recipe_digest(other)
    assert recipe_digest(one) != recipe_digest(load_recipe(write(tmp_path, BASE), ["seed=1"]))


def test_numbers_with_an_exponent_are_numbers_and_integers_serve_as_numbers(tmp_path: Path) -> None:
    overrides = ["trainer.optimizer.learning_rate=3e-4", "rollout.lease_s=10", "trainer.optimizer.betas=[0, 5e-1]"]
    recipe = load_recipe(write(tmp_path, BASE), overrides)
    assert recipe.trainer.optimizer.learning_rate == 3e-4
    assert recipe.trainer.optimizer.betas == (0.0, 0.5)


def test_a_byte_order_mark_and_anchors_are_fine(tmp_path: Path) -> None:
    text = "\ufeff" + BASE + "rollout: {sampling: &s {top_k: 3}}\n"
    assert load_recipe(write(tmp_path, text)).rollout.sampling.top_k == 3
    merged = BASE + "rollout: {sampling: {<<: {top_k: 3, top_p: 0.5}, top_k: 4}}\n"
    sampling = load_recipe(write(tmp_path, merged)).rollout.sampling
    assert (sampling.top_k, sampling.top_p) == (4, 0.5)


# -- extends --------------------------------------------------------------------------------------------------------


def test_extends_merges_key_by_key_along_a_chain(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, BASE + "rollout: {sampling: {top_k: 5, stop: [a, b]}}\n", "base.yaml")
    write(tmp_path, "extends: ../base.yaml\nsteps: 7\nrollout: {sampling: {stop: [c]}}\n", "sub/middle.yaml")
    path = write(tmp_path, "extends: sub/middle.yaml\nname: top\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.steps) == ("top", 7)
    assert (recipe.rollout.sampling.top_k, recipe.rollout.sampling.stop) == (5, ("c",))


def test_a_section_whose_kind_changes_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, BASE, "base.yaml")
    path = write(
        tmp_path, "extends: base.yaml\nmodel: {kind: pretrained, path: m}\ndata: {kind: arithmetic, operations: '*'}"
    )
    recipe = load_recipe(path)
    assert recipe.model == PretrainedModel(path="m")
    assert recipe.data == ArithmeticData(operations="*", max_operand=12)


def test_extends_that_cannot_be_followed(tmp_path: Path) -> None:
    path = write(tmp_path, "extends: bass.yaml\n")
    write(tmp_path, BASE, "base.yaml")
    text = problem(path)
    assert "recipe.yaml, line 1" in text and "bass.yaml" in text and f"near it: {tmp_path / 'base.yaml'}" in text
    assert "allowed: the path of one other recipe" in problem(write(tmp_path, "extends: [a, b]\n"))
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "in a circle" in problem(tmp_path / "a.yaml")
    assert "in a circle" in problem(write(tmp_path, "extends: recipe.yaml\n"))


def test_a_problem_is_traced_to_the_file_it_is_in(tmp_path: Path) -> None:
    write(tmp_path, BASE + "seed: -1\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\n\nsteps: 0\n")
    text = problem(path, "trainer.ranks=0")
    assert "2 problems" not in text and "3 problems" in text
    assert f"seed ({tmp_path / 'base.yaml'}, line 5): found -1; allowed: integer, at least 0" in text
    assert f"steps ({path}, line 3): found 0; allowed: integer, at least 1" in text
    assert "trainer.ranks (--set trainer.ranks=0): found 0; allowed: integer, at least 1" in text


# -- set ------------------------------------------------------------------------------------------------------------


def test_set_takes_yaml_values_and_the_last_one_wins(tmp_path: Path) -> None:
    overrides = ["steps=4", "rollout.sampling.stop=[x, 'y=z']", "steps=5", "environment.reward=a.b:c", "model.layers=1"]
    recipe = load_recipe(write(tmp_path, BASE), overrides)
    assert (recipe.steps, recipe.rollout.sampling.stop, recipe.environment.reward) == (5, ("x", "y=z"), "a.b:c")


@pytest.mark.parametrize("order", [1, -1])
def test_set_of_a_kind_empties_the_section_in_either_order(tmp_path: Path, order: int) -> None:
    overrides = ["data.kind=file", "data.path=p.jsonl"][::order]
    assert load_recipe(write(tmp_path, BASE), overrides).data == FileData(path="p.jsonl")


def test_set_of_a_section_replaces_it(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, BASE), ["data={kind: arithmetic, operations: '-'}"])
    assert recipe.data == ArithmeticData(operations="-")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "--set steps: not of the form a.b=value"),
        ("=3", "not of the form"),
        ("a..b=3", "not of the form"),
        ("name.x=3", "`name` is 'base', not a section"),
        ("rolout.workers=3", "rolout (--set rolout.workers=3): unknown key"),
        ("rollout.wokers=3", "did you mean `rollout.workers`?"),
        ("workers=3", "did you mean `rollout.workers`?"),
        ("trainer.ranks=[", "--set trainer.ranks=[: not readable as YAML"),
        ("trainer.ranks={a: 1, a: 2}", "`trainer.ranks.a` appears twice"),
        ("trainer.ranks=", "found null; allowed: integer, at least 1"),
        ("trainer.ranks=true", "found true; allowed: integer"),
        ("trainer.ranks='2'", 'found "2"; allowed: integer, at least 1 (without quotes)'),
        ("trainer.ranks=2.5", "found 2.5; allowed: integer"),
        ("rollout.sampling.top_k=0", "top_k is 0; allowed: -1 (all) or at least 1"),
        ("name=12", "found 12; allowed: text, must match `^[A-Za-z0-9]"),
        ("name=12", "put it in quotes"),
        ("rollout.lease_s=.nan", "rollout.lease_s"),
        ("rollout.lease_s=.inf", "rollout.lease_s"),
        ("algorithm.clip_low=1", "found 1; allowed: number, at least 0, less than 1"),
        ("algorithm.kl_estimator=k4", 'found "k4"; allowed: one of `k1`, `k2`, `k3`'),
        ("trainer.optimizer.betas=[0.9, 1]", "trainer.optimizer.betas.1"),
        ("trainer.optimizer.betas=[0.9]", "list of 2 numbers (at least 0, less than 1)"),
        ("data.kind=arithmetics", 'data.kind (--set data.kind=arithmetics): found "arithmetics"; allowed: one of'),
        ("rollout.groups_per_lease=3", "must divide trainer.groups_per_step (16)"),
        ("environment=5", "environment (--set environment=5): found 5; allowed: section"),
        ("extends=x.yaml", "extends (--set extends=x.yaml): unknown key"),
    ],
)
def test_each_wrong_override_is_explained(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in problem(write(tmp_path, BASE), override)


def test_a_schedule_cannot_rise(tmp_path: Path) -> None:
    overrides = ("trainer.optimizer.schedule=cosine", "trainer.optimizer.min_learning_rate=1")
    text = problem(write(tmp_path, BASE), *overrides)
    assert "trainer.optimizer" in text and "min_learning_rate (1) is above learning_rate (0.0001)" in text


# -- broken files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "recipe.yaml is empty"),
        ("# nothing\n", "recipe.yaml is empty"),
        ("- a\n", "is a list, not a mapping"),
        ("hello\n", "is a single value, not a mapping"),
        ("name: a\nsteps: [1\nseed: 2\n", "recipe.yaml, line 3"),
        ("name: a\n\tsteps: 1\n", "recipe.yaml, line 2"),
        (BASE + "steps: 4\n", "recipe.yaml, line 5: the key `steps` appears twice; the first is in"),
        (BASE + "rollout:\n  workers: 1\n  workers: 2\n", "line 7: the key `rollout.workers` appears twice"),
        ("name: a\n---\nname: b\n", "expected a single document"),
        ("name: !python/object:os.system x\n", "recipe.yaml, line 1"),
        ("name: !!binary aGk=\n", "has a YAML type that is not used here"),
        ("seed: !!int x\n", "line 1: 'x' is not readable"),
        ("1: a\n", "the key '1' is not text"),
        ("? [a]\n: b\n", "is not text"),
        ("name: &a [*a]\n", "refers to itself"),
        ("a: &a {b: *a}\n", "refers to itself"),
        ("name: \x07\n", "not readable as YAML"),
        ('name: "\\ud800"\n', "recipe.yaml"),
        ("steps: 3\n", "name: missing; expected text"),
        ("steps: 3\n", "model: missing; expected section of one `kind`: `made`, `pretrained` (What is trained.)"),
        (BASE.replace("kind: made, ", ""), "model.kind"),
        (BASE.replace("layers", "layres"), "unknown key with value 3; did you mean `model.layers`?"),
        (BASE.replace("kind: made", "kind: made, zzz: 1"), "allowed here: kind, hidden_size"),
    ],
)
def test_each_broken_file_is_explained(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problem(write(tmp_path, text))


def test_deeply_nested_yaml_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in problem(write(tmp_path, "name: " + "[" * 1500 + "]" * 1500))


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    write(tmp_path, BASE, "tiny.yaml")
    text = problem(tmp_path / "tniy.yaml")
    assert "there is no recipe" in text and str(tmp_path / "tiny.yaml") in text
    assert "does not exist" in problem(tmp_path / "nowhere" / "tiny.yaml")
    assert "cannot read the recipe" in problem(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: a\nseed: \xe9\n")
    assert "latin.yaml, line 2: not UTF-8" in problem(tmp_path / "latin.yaml")


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    text = problem(write(tmp_path, BASE.replace("layers: 3", "layers: 0") + "sed: 1\ntrainer: {rank: 2}\n"))
    assert "3 problems" in text
    assert text.count("did you mean") == 2


def test_recipes_load_without_torch() -> None:
    code = "import sys, milesbatch.recipe.load, milesbatch.recipe.document; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
