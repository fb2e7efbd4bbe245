"""The reward function of a run's recipe, called again for recorded trajectories: are its rewards reproducible?

Owns which samples are scored again and what counts as a difference. Never changes a run; what the user's function
prints goes to standard error. Invariant: the function sees what it saw when the sample was made: the prompt of the
recipe's own stream while that is still the same (its fingerprint says so), else the recorded one; and the recorded
response. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milesbatch.analysis.counted import Counted
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.environments.judge import Judge, Judgement, reward_fingerprint
from milesbatch.environments.prompts import Message, Prompt, PromptStream, open_prompts
from milesbatch.errors import CorruptArtefactError, InputError, MilesbatchError
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import PretrainedModel, Recipe
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_run_record

_COLUMNS = ("group_id", "sample_index", "step", "prompt_id", "messages", "env", "reward", "rewards", "error")
_AT_ONCE = 256
"""Samples that an asynchronous reward function works on at the same time."""
_FROM_REWARD = "reward function "
"""Begins the errors of episodes that failed in the reward function; others cannot be judged again."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A sample whose reward came out otherwise."""

    group_id: int
    sample_index: int
    step: int | None
    prompt_id: str
    recorded: float | None
    """Null when the episode failed."""
    now: float | None
    recorded_parts: Mapping[str, float]
    parts: Mapping[str, float]
    recorded_error: str | None
    error: str | None
    response: str

    @property
    def gap(self) -> float:
        """How far apart the rewards are; infinite when one of the two failed."""
        if self.recorded is None or self.now is None:
            return float("inf")
        return abs(self.now - self.recorded)


@dataclass(slots=True)
class Rescored:
    """The result; ``differences`` holds the largest ones, largest first."""

    reward: str
    """``package.module:name`` of the function."""
    is_changed: bool | None
    """Is its source another than when the run began? Null when that is not known."""
    prompts: str
    """``recipe`` or ``recorded``: where the prompts came from."""
    groups: int = 0
    """Prompt groups that the run has."""
    drawn: int = 0
    """How many of them were drawn, to be judged again."""
    compared: int = 0
    differing: int = 0
    skipped: int = 0
    """Episodes that failed before they were judged."""
    recorded_sum: float = 0.0
    now_sum: float = 0.0
    differences: list[Difference] = field(default_factory=list)


def rescore(
    scan: TrajectoryScan,
    *,
    sample: int | None = 200,
    seed: int = 0,
    reward: str | None = None,
    tolerance: float = 0.0,
    most: int = 10,
    progress: Callable[[int], None] = lambda count: None,
) -> Rescored:
    """Judge about ``sample`` trajectories again (whole groups, drawn with ``seed``; all with None) and compare.

    ``reward`` names another function than the recipe's. Rewards and their parts differ when they are further apart than
    ``tolerance``.

    Raises:
        ExtensionError: the function cannot be loaded.
        InputError: the recipe is not there or not readable.
    """
    layout = scan.counted.layout
    recipe, fingerprints = _recipe(layout)
    spec = reward or recipe.environment.reward
    judge = Judge(spec)
    stream = _stream(recipe, fingerprints.get("data"))
    known = None if reward else fingerprints.get("reward")
    result = Rescored(
        spec, None if known is None else known != reward_fingerprint(spec), "recorded" if stream is None else "recipe"
    )
    chosen = None if sample is None else _draw(scan.counted, sample, recipe.rollout.samples_per_group, seed)
    result.groups = len(scan.counted.group_id)
    result.drawn = result.groups if chosen is None else len(chosen)
    files = None if chosen is None else scan.counted.files_of(np.isin(scan.counted.group_id, chosen))
    wanted = None if chosen is None else set(chosen.tolist())
    prompt_of = _Prompts(recipe, stream)
    for batch in scan.batches(_COLUMNS, files):
        for start in range(0, batch.num_rows, _AT_ONCE):
            rows = [r for r in batch.slice(start, _AT_ONCE).to_pylist() if wanted is None or r["group_id"] in wanted]
            _judge(judge, prompt_of, rows, tolerance, most, result)
            progress(result.compared)
    return result


def _recipe(layout: RunLayout) -> tuple[Recipe, Mapping[str, str]]:
    record = read_run_record(layout)
    if record is None:
        raise InputError(f"{layout.root} is not a run: it has no run.json", mend="give the directory of a run")
    if not layout.recipe.exists():
        raise CorruptArtefactError(
            f"{layout.recipe} is missing", mend="copy it from the run; it names the reward function"
        )
    return load_recipe(layout.recipe), record.fingerprints


def _stream(recipe: Recipe, fingerprint: str | None) -> PromptStream | None:
    """The recipe's prompts, when they are here and what they were."""
    try:
        stream = open_prompts(recipe)
        return stream if stream.fingerprint() == fingerprint else None
    except MilesbatchError:
        return None


def _draw(counted: Counted, sample: int, size: int, seed: int) -> Any:
    """Ids of as many groups of ``size`` samples as make ``sample``."""
    number = min(len(counted.group_id), -(-sample // size))
    return np.random.default_rng(seed).choice(counted.group_id, number, replace=False) if number else counted.group_id


class _Prompts:
    """From a recorded row to the prompt that the function is called with."""

    def __init__(self, recipe: Recipe, stream: PromptStream | None) -> None:
        self._stream = stream
        model = recipe.model
        self._system = model.system_prompt if isinstance(model, PretrainedModel) else None

    def __call__(self, row: Mapping[str, Any]) -> Prompt:
        if self._stream is not None:
            prompt = self._stream.prompt(row["group_id"])
            if prompt.prompt_id == row["prompt_id"]:
                return prompt
        env = json.loads(row["env"])
        messages = [Message(m["role"], m["content"]) for m in row["messages"][:-1]]
        if self._system is not None and messages[:1] == [Message("system", self._system)]:
            del messages[0]
        return Prompt(row["prompt_id"], tuple(messages), env.pop("answer", ""), env)


def _judge(
    judge: Judge,
    prompt_of: _Prompts,
    rows: Sequence[Mapping[str, Any]],
    tolerance: float,
    most: int,
    result: Rescored,
) -> None:
    judged = [row for row in rows if row["error"] is None or row["error"].startswith(_FROM_REWARD)]
    result.skipped += len(rows) - len(judged)
    cases = [(prompt_of(row), row["messages"][-1]["content"] if row["messages"] else "") for row in judged]
    with contextlib.redirect_stdout(sys.stderr):
        judgements = judge.judge_all(cases)
    for row, (_, response), now in zip(judged, cases, judgements, strict=True):
        result.compared += 1
        result.recorded_sum += row["reward"]
        result.now_sum += now.reward
        if _differs(row, now, tolerance):
            result.differing += 1
            result.differences.append(_difference(row, response, now))
    result.differences.sort(key=lambda one: (-one.gap, one.group_id, one.sample_index))
    del result.differences[most:]


def _differs(row: Mapping[str, Any], now: Judgement, tolerance: float) -> bool:
    if (row["error"] is None) != (now.error is None):
        return True
    if now.error is not None:
        return False
    recorded = dict(row["rewards"])
    if recorded.keys() != now.parts.keys():
        return True
    pairs = [(row["reward"], now.reward), *((recorded[name], value) for name, value in now.parts.items())]
    return any(abs(before - after) > tolerance for before, after in pairs)


def _difference(row: Mapping[str, Any], response: str, now: Judgement) -> Difference:
    return Difference(
        group_id=row["group_id"],
        sample_index=row["sample_index"],
        step=row["step"],
        prompt_id=row["prompt_id"],
        recorded=row["reward"] if row["error"] is None else None,
        now=now.reward if now.error is None else None,
        recorded_parts=dict(row["rewards"]),
        parts=dict(now.parts),
        recorded_error=row["error"],
        error=now.error,
        response=response,
    )
