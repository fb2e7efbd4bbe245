"""Held-out prompts: those that an evaluation asks, and the check that training never asks them.

Owns the choice of prompts and the comparison with what the run trains on. Never judges or generates. Invariant: prompt
``i`` of an evaluation is a pure function of (recipe seed, section, i), as in training, so that two policy versions, and
two starts, are asked the same. The page behind it is ``docs/evaluation.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from milesbatch.environments.prompts import Prompt, PromptStream, open_prompts, open_stream
from milesbatch.errors import DataError
from milesbatch.recipe.models import Data, MadeModel, Recipe
from milesbatch.records import canonical_json, digest_bytes

_SHOWN = 3
_LONGEST = 60

Asked = tuple[tuple[str, str], ...]
"""Roles and contents of a prompt's messages: what the policy sees, whatever the prompt is called."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The prompts of an evaluation, in order."""

    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, group_id: int) -> Prompt:
        """Prompt number ``group_id``, from 0."""
        return self.prompts[group_id]

    def fingerprint(self) -> str:
        """Digest of all that is asked, of the reference answers, and of what the reward function gets beside."""
        rows = [[p.prompt_id, [m.as_dict() for m in p.messages], p.answer, dict(p.env)] for p in self.prompts]
        return digest_bytes(canonical_json(rows))


def open_held_out(data: Data, num_prompts: int | None, seed: int) -> HeldOut:
    """The first ``num_prompts`` prompts (all, with None) of the stream that ``data`` describes.

    Raises:
        DataError: there are fewer, none without end, or the data cannot be read.
        RecipeError: the section is wrong.
    """
    stream = open_stream(data, seed, "evaluation")
    available = stream.num_prompts
    number = available if num_prompts is None else num_prompts
    if number is None:
        raise DataError(
            f"prompts of kind {data.kind} have no end, so all of them cannot be asked",
            mend="say how many: evaluation.num_prompts",
        )
    if available is not None and number > available:
        raise DataError(
            f"evaluation.num_prompts is {number}, but there are {available} prompts",
            mend=f"set evaluation.num_prompts to {available} at most, or to null",
        )
    return HeldOut(tuple(stream.prompt(place) for place in range(number)))


def check_held_out(held_out: HeldOut, recipe: Recipe) -> None:
    """Return only when no prompt of ``held_out`` is asked in the training of ``recipe``.

    Compared is what the policy is shown, but for blanks at either end. A file is compared whole; of prompts without end
    those of the recipe's steps are made. The supervised start of a made model counts as training.

    Raises:
        DataError: some are; names them, and says which training prompt each one is.
    """
    wanted: dict[Asked, list[int]] = {}
    for place, prompt in enumerate(held_out.prompts):
        wanted.setdefault(_asked(prompt), []).append(place)
    found: dict[int, str] = {}
    for prompt, where in _training(recipe):
        for place in wanted.pop(_asked(prompt), ()):
            found[place] = where
        if not wanted:
            break
    if not found:
        return
    lines = [
        f"{_short(held_out.prompt(place))} (evaluation prompt {place}) is {where}"
        for place, where in sorted(found.items())[:_SHOWN]
    ]
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    listed = "\n  ".join(lines)
    raise DataError(
        f"{len(found)} of {len(held_out)} evaluation prompts are asked in training too, so they are not held out:"
        f"\n  {listed}{more}",
        mend="give evaluation.prompts that training never asks, for example by splitting one file into two",
    )


def _training(recipe: Recipe) -> Iterator[tuple[Prompt, str]]:
    """All that the run trains on, with words for where it is asked."""
    stream = open_prompts(recipe)
    count = _count(stream, recipe.steps * recipe.trainer.groups_per_step)
    yield from ((stream.prompt(group), f"that of training group {group}") for group in range(count))
    if isinstance(recipe.model, MadeModel) and recipe.model.warm_start.steps:
        start = open_prompts(recipe, "warm_start")
        examples = range(_count(start, recipe.model.warm_start.examples))
        yield from ((start.prompt(place), f"example {place} of the supervised start") for place in examples)


def _count(stream: PromptStream, asked: int) -> int:
    """A file is asked whole sooner or later, and again after that."""
    return asked if stream.num_prompts is None else stream.num_prompts


def _asked(prompt: Prompt) -> Asked:
    return tuple((message.role, message.content.strip()) for message in prompt.messages)


def _short(prompt: Prompt) -> str:
    text = " ".join(itertools.islice((" ".join(m.content.split()) for m in prompt.messages), 2))
    return repr(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
