"""Reward functions that come with the package, and the one signature of all reward functions.

A reward function is a plain function, named in a recipe as ``package.module:name``::

    def my_reward(prompt: Prompt, response: str) -> float | Mapping[str, float]: ...

* ``prompt``: the :class:`~milesbatch.environments.prompts.Prompt` of the group; ``prompt.answer`` is the reference answer,
  ``prompt.env`` holds what else the data says.
* ``response``: the text of one sample, without special tokens.
* The result is a finite number, or a mapping of named parts. A mapping's total is its ``reward`` entry when there is one,
  else the sum of the parts. The function may be ``async def`` (or return any awaitable of these).

A function that raises, or returns anything else (NaN too), makes the episode fail with an error that is recorded; the run
goes on until ``environment.max_failed_share`` of the last episodes failed (see :mod:`milesbatch.environments.judge`).
Rewards must be pure for a bitwise deterministic run: no clock, no own randomness.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping

from milesbatch.environments.gym import score_response
from milesbatch.environments.prompts import Prompt

Score = float | Mapping[str, float]
RewardFunction = Callable[[Prompt, str], Score | Awaitable[Score]]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(prompt: Prompt, response: str) -> float:
    """1 when the response is the reference answer, white space around it aside; else 0."""
    return float(response.strip() == prompt.answer.strip())


def last_number(prompt: Prompt, response: str) -> float:
    """1 when the last number in the response equals the reference answer, however it is worded; else 0."""
    numbers = _NUMBER.findall(response.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == _as_number(prompt.answer))


def digit_match(prompt: Prompt, response: str) -> dict[str, float]:
    """Shaped: the share of characters of the answer that are right, counted from the end, at half weight, and exactness.

    Only an exact answer gets 1; being close gets less than 0.5.
    """
    answer, given = prompt.answer.strip(), response.strip()
    exact = float(given == answer)
    right = sum(a == b for a, b in zip(reversed(answer), reversed(given), strict=False))
    close = right / max(len(answer), len(given), 1)
    return {"exact": 0.5 * exact, "digits": 0.5 * close}


def gym_score(prompt: Prompt, response: str) -> float:
    """The reasoning-gym task's own score of the text in the last ``<answer>`` tag, or of the whole response without one.

    Raises:
        KeyError: the recipe's data is not from reasoning-gym.
    """
    tagged = _TAGGED.findall(response)
    return score_response(prompt.env, (tagged[-1] if tagged else response).strip())


def _as_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text.strip().replace(",", ""))
    return float(match[0]) if match else None
