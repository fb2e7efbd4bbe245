"""Held-out prompts: the same for every version, and never those of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import make_recipe

from milesbatch.environments.held_out import check_held_out, open_held_out
from milesbatch.errors import DataError
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import ArithmeticData, FileData, Recipe
from milesbatch.recipe.shipped import shipped_recipes


def write(path: Path, prompts: Sequence[str]) -> FileData:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in prompts))
    return FileData(path=str(path))


def recipe_on(data: Any, **changes: Any) -> Recipe:
    recipe = make_recipe(model={"kind": "made", "warm_start": {"steps": 0}}, **changes)
    return recipe.model_copy(update={"data": data})


def test_a_file_is_asked_whole_and_each_time_the_same(tmp_path: Path) -> None:
    data = write(tmp_path / "eval.jsonl", [f"{n}+1=" for n in range(7)])
    held_out = open_held_out(data, None, seed=3)
    assert sorted(prompt.text for prompt in held_out.prompts) == [f"{n}+1=" for n in range(7)]
    assert open_held_out(data, None, seed=3) == held_out
    assert open_held_out(data, 4, seed=3).prompts == held_out.prompts[:4]
    assert open_held_out(data, 4, seed=3).fingerprint() != held_out.fingerprint()
    with pytest.raises(DataError, match="num_prompts is 8, but there are 7"):
        open_held_out(data, 8, seed=3)


def test_prompts_without_end_need_a_number() -> None:
    data = ArithmeticData(max_operand=9)
    assert len(open_held_out(data, 5, seed=0)) == 5
    with pytest.raises(DataError, match=r"say how many: evaluation\.num_prompts"):
        open_held_out(data, None, seed=0)


def test_prompts_of_the_training_file_are_refused_with_their_names(tmp_path: Path) -> None:
    training = write(tmp_path / "train.jsonl", ["1+1=", "2+2=", "3+3="])
    held_out = open_held_out(write(tmp_path / "eval.jsonl", ["4+4=", " 3+3= ", "5+5=", "1+1="]), None, seed=0)
    with pytest.raises(DataError) as caught:
        check_held_out(held_out, recipe_on(training))
    said = str(caught.value)
    assert "2 of 4 evaluation prompts are asked in training too" in said
    assert "'3+3='" in said and "'1+1='" in said and "that of training group" in said
    check_held_out(open_held_out(write(tmp_path / "other.jsonl", ["4+4="]), None, seed=0), recipe_on(training))


def test_of_prompts_without_end_those_of_the_recipes_steps_are_compared() -> None:
    few = recipe_on(ArithmeticData(max_operand=99), steps=1)
    held_out = open_held_out(ArithmeticData(max_operand=99), 60, seed=0)
    check_held_out(held_out, few)
    with pytest.raises(DataError, match="evaluation prompts are asked in training"):
        check_held_out(held_out, few.model_copy(update={"steps": 2000}))


def test_the_supervised_start_of_a_made_model_is_training_too(tmp_path: Path) -> None:
    held_out = open_held_out(ArithmeticData(max_operand=9), 10, seed=1)
    recipe = make_recipe(data={"kind": "arithmetic", "max_operand": 9}, steps=1)
    with pytest.raises(DataError, match="of the supervised start"):
        check_held_out(held_out, recipe)


def test_the_shipped_recipe_holds_its_prompts_out() -> None:
    recipe = load_recipe(shipped_recipes() / "tiny-eval.yaml")
    assert recipe.evaluation is not None
    held_out = open_held_out(recipe.evaluation.prompts, recipe.evaluation.num_prompts, recipe.seed)
    check_held_out(held_out, recipe)
    assert len(held_out) == 20
    assert all(eval(prompt.text[:-1]) == int(prompt.answer) for prompt in held_out.prompts)
    with pytest.raises(DataError, match="20 of 20"):
        check_held_out(held_out, load_recipe(shipped_recipes() / "tiny.yaml"))
