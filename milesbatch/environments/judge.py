"""Calling the user's reward function: loading it by name, and turning whatever it does into a judgement.

Owns the border to user code. Never lets an exception of the user's function end a worker. Invariant: for every response
there is one :class:`Judgement`, with a finite reward or with an error that names function, prompt and the user's line.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from milesbatch.environments.prompts import Prompt
from milesbatch.environments.rewards import RewardFunction
from milesbatch.errors import ExtensionError
from milesbatch.records import canonical_json, digest_bytes

_LONGEST_ERROR = 2000
_FROM_USERS = (Exception, SystemExit, asyncio.CancelledError)
"""What may come out of user code: anything. One bad episode must not end the worker, not even ``sys.exit``; a cancelled call is
what a time-out of an asynchronous client looks like."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The reward of one response with its named parts; when ``error`` is set the episode failed and ``reward`` is 0."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


def load_reward(spec: str) -> RewardFunction:
    """The function that ``spec`` (``package.module:name``) names.

    Raises:
        ExtensionError: the spec, the module or the name is wrong, importing fails, or it is not a function; names ``spec``
            and the file.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ExtensionError(
            f"environment.reward is {spec!r}", mend="write it as package.module:name, for example rewards:exact"
        )
    module = _import_module(spec, module_name)
    file = getattr(module, "__file__", None) or module_name
    if not hasattr(module, name):
        functions = sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_"))
        raise ExtensionError(
            f"environment.reward is {spec!r}, but {file} has no {name!r}",
            mend=f"functions there: {', '.join(functions) or 'none'}",
        )
    function: RewardFunction = getattr(module, name)
    if not callable(function):
        raise ExtensionError(
            f"environment.reward is {spec!r}, but {name!r} in {file} is a {type(function).__name__}, not a function",
            mend="name a function (prompt, response) -> number",
        )
    _check_signature(spec, file, function)
    return function


def reward_fingerprint(spec: str) -> str:
    """Digest of the function's name and source text, so that a changed reward is noticed when a run goes on.

    Raises:
        ExtensionError: as :func:`load_reward`.
    """
    function = load_reward(spec)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        # Compiled functions and callable objects have no source text; their name must do.
        source = ""
    return digest_bytes(canonical_json({"spec": spec, "source": source}))


class Judge:
    """Scores responses with one reward function."""

    def __init__(self, spec: str) -> None:
        """Load the function.

        Raises:
            ExtensionError: as :func:`load_reward`.
        """
        self._spec = spec
        self._function = load_reward(spec)

    def judge(self, prompt: Prompt, response: str) -> Judgement:
        """Score one response; never raises for what the user's function does."""
        return self.judge_all([(prompt, response)])[0]

    def judge_all(self, cases: Sequence[tuple[Prompt, str]]) -> list[Judgement]:
        """Score several responses, in order; an async function runs for all of them at once.

        Not to be called from inside a running event loop.
        """
        results = [self._called(prompt, response) for prompt, response in cases]
        waiting = {i: result for i, result in enumerate(results) if inspect.isawaitable(result)}
        if waiting:
            prompts = {i: cases[i][0] for i in waiting}
            for i, result in zip(waiting, asyncio.run(self._awaited(prompts, waiting)), strict=True):
                results[i] = result
        return [
            result if isinstance(result, Judgement) else self._read(prompt, result)
            for (prompt, _), result in zip(cases, results, strict=True)
        ]

    def _called(self, prompt: Prompt, response: str) -> Any:
        try:
            return self._function(prompt, response)
        except _FROM_USERS as error:
            return self._failed(prompt, _where(error))

    async def _awaited(self, prompts: Mapping[int, Prompt], waiting: Mapping[int, Awaitable[Any]]) -> list[Any]:
        return await asyncio.gather(*(self._one(prompts[i], result) for i, result in waiting.items()))

    async def _one(self, prompt: Prompt, result: Awaitable[Any]) -> Any:
        try:
            return await result
        except _FROM_USERS as error:
            return self._failed(prompt, _where(error))

    def _read(self, prompt: Prompt, result: Any) -> Judgement:
        try:
            if not isinstance(result, Mapping):
                return Judgement(_number("the result", result))
            parts = {_plain(str(name)): _number(f"part {name!r}", value) for name, value in result.items()}
            if not parts:
                raise ValueError("the result is an empty mapping")
            total = parts["reward"] if "reward" in parts else _number("the sum of the parts", sum(parts.values()))
            return Judgement(total, {name: value for name, value in parts.items() if name != "reward"})
        except ValueError as error:
            return self._failed(prompt, f"{error} ({_defined_at(self._function)})")

    def _failed(self, prompt: Prompt, cause: str) -> Judgement:
        text = f"reward function {self._spec} failed on prompt {prompt.prompt_id}: {cause}"
        return Judgement(reward=0.0, error=_plain(text))


def _plain(text: str) -> str:
    """Text that can be stored: no lone surrogates, and not longer than anybody reads."""
    return text[:_LONGEST_ERROR].encode("utf-8", "backslashreplace").decode()


def _import_module(spec: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ExtensionError(
            f"environment.reward is {spec!r}, but there is no module {error.name!r}",
            mend="install it, or put its directory on PYTHONPATH",
        ) from error
    except Exception as error:
        raise ExtensionError(
            f"environment.reward is {spec!r}, but importing {module_name} failed: {_where(error)}",
            mend="mend that file; `python -c 'import " + module_name + "'` must work",
        ) from error


def _check_signature(spec: str, file: str, function: RewardFunction) -> None:
    try:
        inspect.signature(function).bind(None, "")
    except TypeError as error:
        raise ExtensionError(
            f"environment.reward is {spec!r}, but {file} defines it with other parameters ({error})",
            mend="define it as (prompt, response)",
        ) from error
    except ValueError:
        # Some compiled functions do not tell their signature; calling will show.
        return


def _number(what: str, value: Any) -> float:
    """``value`` as a finite float.

    Raises:
        ValueError: it is not a number, or NaN or infinite.
    """
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"{what} is {value!r:.80}, a {type(value).__name__}; a number is needed")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{what} cannot be read as one number: {error}") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; a finite number is needed")
    return number


def _where(error: BaseException) -> str:
    """The exception with the file and line that raised it. The last frame in a file of the user says most."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}"
    outside = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    users = [
        frame for frame in outside if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    chosen = (users or outside or frames)[-1:]
    return text + "".join(f" ({frame.filename}:{frame.lineno})" for frame in chosen)


def _defined_at(function: RewardFunction) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
