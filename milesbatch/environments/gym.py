"""Prompts from ``reasoning-gym``, and the score that a task itself gives to an answer.

Owns the bridge to that package; imports it only when a recipe uses it. Never keeps state between groups. Invariant: item
``g`` is a pure function of (seed, task, options, purpose, g); it can be made again anywhere, so ``env`` only names it.

Source: https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from milesbatch.environments.prompts import Message, Prompt, Purpose, stream_seed
from milesbatch.errors import RecipeError
from milesbatch.recipe.models import ReasoningGymData
from milesbatch.records import canonical_json, digest_bytes

_ENDLESS = 1 << 31
"""reasoning-gym wants a size; items are made on demand, so a large one costs nothing."""


class GymStream:
    """One reasoning-gym data set as an endless prompt stream."""

    def __init__(self, data: ReasoningGymData, seed: int, purpose: Purpose = "train") -> None:
        """Open the data set and make its first item, so that wrong options are found before anything is queued.

        Raises:
            RecipeError: the package is missing, or the task or an option does not exist.
        """
        self._data = data
        # reasoning-gym seeds item i with seed + i: neighbouring recipe seeds would give the same items, shifted by one.
        # Its generators take 32-bit seeds.
        self._seed = stream_seed(seed, "reasoning_gym", data.task, purpose) % (1 << 31)
        self._purpose = purpose
        self._dataset = open_dataset(data.task, json.dumps(data.options, sort_keys=True), self._seed)
        self.prompt(0)

    def prompt(self, group_id: int) -> Prompt:
        """The item of a group; ``env`` names it so that :func:`score_response` can make it again.

        Raises:
            RecipeError: the task cannot make an item with these options.
        """
        data = self._data
        try:
            item = self._dataset[group_id]
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RecipeError(
                f"reasoning-gym task {data.task!r} cannot make item {group_id} with data.options {data.options}: {error}",
                mend="change data.options",
            ) from error
        question = item["question"] + (f"\n{data.instruction}" if data.instruction else "")
        return Prompt(
            prompt_id=f"{data.task}-{self._purpose}-{group_id}",
            messages=(Message("user", question),),
            answer=str(item["answer"]),
            env={"task": data.task, "options": data.options, "seed": self._seed, "index": group_id},
        )

    @property
    def num_prompts(self) -> None:
        """There is no end."""

    def fingerprint(self) -> str:
        """Digest of the data section and the version of the package, which decides what an item is."""
        version = importlib.import_module("reasoning_gym").__version__
        return digest_bytes(canonical_json({"data": self._data.model_dump(mode="json"), "reasoning_gym": version}))


@functools.lru_cache(maxsize=8)
def open_dataset(task: str, options: str, seed: int) -> Any:
    """The data set of ``task`` with ``options`` (JSON text, so that it can be a cache key).

    Raises:
        RecipeError: the package is missing, or the task or an option does not exist.
    """
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise RecipeError(
            f"data.kind is reasoning_gym, but the package cannot be imported ({error})",
            mend="pip install reasoning-gym",
        ) from error
    if task not in factory.DATASETS:
        near = difflib.get_close_matches(task, factory.DATASETS, n=3) or sorted(factory.DATASETS)[:5]
        raise RecipeError(
            f"data.task is {task!r}, which reasoning-gym does not have", mend=f"nearest: {', '.join(near)}"
        )
    chosen = json.loads(options)
    try:
        return reasoning_gym.create_dataset(task, **{**chosen, "seed": seed, "size": _ENDLESS})
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        allowed = sorted(set(factory.DATASETS[task][1].__dataclass_fields__) - {"seed", "size"})
        raise RecipeError(
            f"data.options {chosen} do not suit reasoning-gym task {task!r}: {error}",
            mend=f"options of this task: {', '.join(allowed)}",
        ) from error


def score_response(env: Mapping[str, Any], answer: str) -> float:
    """The task's own score, usually 0 to 1, of ``answer`` for the item that ``env`` names.

    Raises:
        KeyError: ``env`` does not come from a :class:`GymStream`.
    """
    dataset = open_dataset(env["task"], json.dumps(env["options"], sort_keys=True), env["seed"])
    return float(dataset.score_answer(answer, dataset[env["index"]]))
