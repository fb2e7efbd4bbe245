"""Rewards, called again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from analysis_runs import write_samples
from builders import make_recipe, make_trajectory, past_incarnation

from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.rescore import Rescored, rescore
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.environments.judge import reward_fingerprint
from milesbatch.environments.prompts import open_prompts
from milesbatch.errors import ExtensionError, InputError
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.trajectory import Message

REWARDS = """
seen = []
def exact(prompt, response):
    seen.append(prompt)
    print("scoring")
    return {"exact": float(response == prompt.answer)}
async def slow(prompt, response):
    return {"exact": float(response == prompt.answer)}
def other(prompt, response):
    if response == "8":
        raise ValueError("eight")
    return {"exact": 0.25}
def parts(prompt, response):
    return {"reward": float(response == prompt.answer), "form": 1.0}
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import importlib
    import sys

    (tmp_path / "scale_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("scale_rewards")
    sys.modules.pop("scale_rewards")


def make(root: Path, *, data: str | None = None) -> RunLayout:
    """A run of 8 arithmetic groups of 2: one right answer, one wrong; the episode of group 7 failed in the engine."""
    layout = RunLayout(root)
    recipe = make_recipe(environment={"reward": "scale_rewards:exact"})
    prompts = open_prompts(recipe)
    lay_out(layout, recipe)
    fingerprints = {"data": data or prompts.fingerprint(), "reward": reward_fingerprint("scale_rewards:exact")}
    commit_run(layout, recipe, fingerprints)
    past_incarnation(layout)
    for group in range(8):
        prompt = prompts.prompt(group)
        rows = []
        for index, response in enumerate((prompt.answer, "wrong")):
            right = float(index == 0)
            error = "the engine gave up" if group == 7 else None
            rows.append(
                make_trajectory(
                    group,
                    index,
                    prompt_id=prompt.prompt_id,
                    messages=(*(Message(m.role, m.content) for m in prompt.messages), Message("assistant", response)),
                    reward=0.0 if error else right,
                    rewards={"exact": 0.0 if error else right},
                    error=error,
                    env={"answer": prompt.answer, **prompt.env},
                )
            )
        write_samples(layout, rows)
    return layout


def again(layout: RunLayout, **options: Any) -> Rescored:
    return rescore(TrajectoryScan(count_groups(layout)), **{"sample": None, **options})


@pytest.mark.usefixtures("rewards")
def test_pure_rewards_come_out_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = again(make(tmp_path / "run"))
    assert (result.compared, result.differing, result.skipped, result.is_changed) == (14, 0, 2, False)
    assert (result.recorded_sum, result.now_sum, result.prompts) == (7.0, 7.0, "recipe")
    out = capsys.readouterr()
    assert "scoring" in out.err and out.out == ""


@pytest.mark.usefixtures("rewards")
def test_an_asynchronous_function(tmp_path: Path) -> None:
    result = again(make(tmp_path / "run"), reward="scale_rewards:slow")
    assert (result.compared, result.differing, result.is_changed) == (14, 0, None)


def test_the_function_sees_what_it_saw(tmp_path: Path, rewards: Any) -> None:
    layout = make(tmp_path / "run")
    again(layout)
    prompts = open_prompts(make_recipe())
    assert rewards.seen[::2] == [prompts.prompt(group) for group in range(7)]
    rewards.seen.clear()
    changed = make(tmp_path / "changed", data="xxh128:" + "0" * 32)
    result = again(changed)
    assert (result.prompts, result.differing) == ("recorded", 0)
    assert rewards.seen[::2] == [prompts.prompt(group) for group in range(7)], "the recording holds all of it"


@pytest.mark.usefixtures("rewards")
def test_another_function_differs_and_the_furthest_come_first(tmp_path: Path) -> None:
    layout = make(tmp_path / "run")
    result = again(layout, reward="scale_rewards:other", most=4)
    assert (result.compared, result.differing, len(result.differences)) == (14, 14, 4)
    gaps = [one.gap for one in result.differences]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] == 0.75
    eights = [one for one in result.differences if one.response == "8"]
    assert all(one.now is None and "eight" in (one.error or "") for one in eights)
    close = again(layout, reward="scale_rewards:other", tolerance=0.8)
    assert close.differing == sum(one.error is not None for one in close.differences)


@pytest.mark.usefixtures("rewards")
def test_other_parts_are_a_difference(tmp_path: Path) -> None:
    result = again(make(tmp_path / "run"), reward="scale_rewards:parts", most=1)
    assert result.differing == 14 and result.differences[0].gap == 0.0
    assert result.differences[0].parts == {"form": 1.0}


@pytest.mark.usefixtures("rewards")
def test_a_draw_is_of_whole_groups_and_repeatable(tmp_path: Path) -> None:
    layout = make(tmp_path / "run")
    options: dict[str, Any] = {"sample": 3, "reward": "scale_rewards:other", "most": 100}
    drawn = [again(layout, **options, seed=seed) for seed in (1, 1, 2, 3, 4)]
    groups = [sorted({one.group_id for one in result.differences}) for result in drawn]
    assert groups[0] == groups[1] and len({tuple(found) for found in groups}) > 1
    assert all(result.compared + result.skipped in (3, 4) for result in drawn)


def test_a_changed_function_is_noticed(tmp_path: Path, rewards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make(tmp_path / "run")
    monkeypatch.setattr(rewards, "exact", rewards.parts)
    result = again(layout)
    assert result.is_changed is True and result.differing == 14


def test_what_is_missing_is_said(tmp_path: Path, rewards: Any) -> None:
    layout = make(tmp_path / "run")
    with pytest.raises(ExtensionError, match="there is no module"):
        again(layout, reward="no_such_module:f")
    layout.recipe.rename(tmp_path / "recipe.yaml")
    with pytest.raises(Exception, match=r"recipe\.yaml is missing"):
        again(layout)
    layout.run_record.rename(tmp_path / "run.json")
    with pytest.raises(InputError, match=r"has no run\.json"):
        again(layout)
    assert rewards and json.loads((tmp_path / "run.json").read_text())
