"""Evaluation that a person asks for: of versions that are there, or of all that come (``--follow``).

    newest incarnation ──> what is due ──> follow the versions ──> again, when the run was started again meanwhile

Owns: which versions, and when to look again. Writes no event log: those have one writer each. Invariant: the same
command again makes only what is missing. The page behind it is ``docs/evaluation.md``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from milesbatch.decisions.origin import origin_of
from milesbatch.engines.sglang.key import key_in
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.errors import InputError, UsageError
from milesbatch.evaluation.asking import Asking, due_versions, open_asking, section_of
from milesbatch.evaluation.evaluator import Evaluator
from milesbatch.evaluation.following import follow_versions, hold_from
from milesbatch.evaluation.generating import Evaluating, open_means
from milesbatch.evaluation.reader import OF_RECIPE
from milesbatch.recipe.models import Evaluation, Recipe
from milesbatch.records import EvaluationRecord
from milesbatch.rollout.episodes import Recorder
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run
from milesbatch.store.survey import read_incarnations
from milesbatch.trajectories.schema import FileMetadata

_WORKER = "evaluation-0"
_POLL_S = 2.0
_KEY_MEND = "name a file that holds the key that the servers of --url were started with, and that this user can read"
_OPTIONS = {
    "every_steps": ("--every", "give a number of steps, 1 or more"),
    "samples_per_prompt": ("--samples", "give a number of samples, 1 or more"),
    "temperature": ("--temperature", "give 0, which always takes the likeliest token, or a number such as 0.7 or 1"),
}
"""Field of the recipe's section -> the option that says it instead, and what to give."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asked for; what is None is as in the recipe."""

    versions: tuple[int, ...] = ()
    """These alone; empty: every ``every`` steps."""
    every: int | None = None
    prompts: Path | None = None
    samples: int | None = None
    temperature: float | None = None
    follow: bool = False
    urls: tuple[str, ...] = ()
    """SGLang servers that run already, for this evaluation alone; empty: one is started."""
    key_file: Path | None = None
    """Absolute; holds the key that ``urls`` want."""


@dataclass(slots=True)
class Outcome:
    """What became of it."""

    asking: Asking
    records: list[EvaluationRecord]
    """By version, those that were there before included."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Version -> why it could not be evaluated."""


@dataclass(slots=True)
class _Story:
    """Turns events into lines, and remembers what was skipped."""

    say: Callable[[str], None]
    skipped: dict[int, str] = field(default_factory=dict)

    def write(self, event: str, **fields: Any) -> None:
        if event == "evaluation_started":
            self.say(f"evaluating policy version {fields['version']}")
        elif event == "evaluation_skipped":
            self.skipped[fields["version"]] = fields["error"]
            self.say(f"not evaluated: {fields['error']}")


def evaluate_by_hand(
    layout: RunLayout, wish: Wish, is_finished: Callable[[int], bool], say: Callable[[str], None]
) -> Outcome:
    """Evaluate what is asked for; with ``wish.follow`` until the run is finished, as ``is_finished`` says of so many steps.

    Raises:
        InputError: the run has not begun, a version is not published, what is asked cannot be asked, or the key cannot
            be read.
        StorageError: something cannot be read or written.
    """
    story, opened = _Story(say), _Opened()
    while True:
        incarnations = read_incarnations(layout)
        if not incarnations:
            raise InputError(f"{layout.root} has not begun", mend="start it, then evaluate its policy versions")
        newest = incarnations[-1].incarnation
        run = _with_key(open_run(layout, newest), wish.key_file)
        section = _wished(section_of(run.recipe, wish.prompts), wish)
        due = wish.versions or due_versions(run.recipe.steps, section.every_steps, origin_of(run.record).step)
        with hold_from(layout, due[0]) as held:
            asking = opened.asking(run.recipe, section, wish)
            means = open_means(run, asking, _who(newest, wish, say))
            evaluator = Evaluator(layout, asking, means.follower, FileMetadata.of_run(run.record), means.prepare)
            look = _Look(evaluator, layout, newest, lambda run=run: is_finished(run.recipe.steps), wish.follow)  # type: ignore[misc]
            try:
                if not wish.follow:
                    due = _published(evaluator, due, run, is_explicit=bool(wish.versions))
                records = follow_versions(layout, evaluator, due, story, held, look.await_published)
            finally:
                means.close()
        if not look.was_started_again:
            return Outcome(asking, records, story.skipped)
        say(f"incarnation {newest + 1} went on with the run")


@dataclass(slots=True)
class _Opened:
    """What is asked, kept when the run is started again: to read and compare all prompts may take long."""

    _asking: tuple[Evaluation, int, Asking] | None = None

    def asking(self, recipe: Recipe, section: Evaluation, wish: Wish) -> Asking:
        if self._asking is None or self._asking[:2] != (section, recipe.steps):
            name = OF_RECIPE if wish.prompts is None else wish.prompts.stem
            self._asking = section, recipe.steps, open_asking(recipe, section, name)
        return self._asking[2]


@dataclass(slots=True)
class _Look:
    """Waits for versions that a running run publishes."""

    evaluator: Evaluator
    layout: RunLayout
    incarnation: int
    is_finished: Callable[[], bool]
    waits: bool
    was_started_again: bool = False

    def await_published(self, version: int) -> bool:
        while True:
            is_over = not self.waits or self.is_finished()  # looked at first: what was published before it is then seen
            if self.evaluator.published_digest(version) is not None:
                return True
            if self.layout.incarnation(self.incarnation + 1).exists():
                self.was_started_again = self.waits
                return False
            if is_over:
                return False
            time.sleep(_POLL_S)


def _with_key(run: OpenRun, key_file: Path | None) -> OpenRun:
    """``run`` as if its recipe named ``key_file``, which is read once, to see that it can be.

    Raises:
        InputError: it cannot, or holds no key.
    """
    if key_file is None:
        return run
    key_in(key_file, "--key-file", _KEY_MEND)
    rollout = run.recipe.rollout
    section = rollout.sglang.model_copy(update={"key_file": str(key_file)})
    rollout = rollout.model_copy(update={"sglang": section})
    return replace(run, recipe=run.recipe.model_copy(update={"rollout": rollout}))


def _wished(section: Evaluation, wish: Wish) -> Evaluation:
    """``section`` with what ``wish`` says.

    Raises:
        UsageError: its values cannot be asked, or not together with the others of the section.
    """
    changes = {
        "every_steps": wish.every,
        "samples_per_prompt": wish.samples,
        "temperature": wish.temperature,
    }
    said = {name: value for name, value in changes.items() if value is not None}
    if not said:
        return section
    try:
        return Evaluation.model_validate({**section.model_dump(), **said})
    except ValidationError as error:
        raise _refused(error, said) from error


def _refused(error: ValidationError, said: Mapping[str, float]) -> UsageError:
    """``error`` in terms of the options: of the one that is wrong, or of those that do not go together."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    names = problem["loc"][:1] or [name for name in said if name != "every_steps"]
    given = " ".join(f"{_OPTIONS[name][0]} {said[name]:g}" for name in said if name in names)
    mend = _OPTIONS[str(names[0])][1] if problem["loc"] else "give a --temperature above 0, or --samples 1"
    return UsageError(f"{given}: {problem['msg'].removeprefix('Value error, ')}", mend=mend)


def _published(evaluator: Evaluator, due: Sequence[int], run: OpenRun, *, is_explicit: bool) -> tuple[int, ...]:
    found = tuple(version for version in due if evaluator.published_digest(version) is not None)
    missing = sorted(set(due) - set(found))
    if is_explicit and missing:
        raise InputError(
            f"policy version {missing[0]} of {run.layout.root} is not published",
            mend="choose one that `milesbatch weights ls` shows, or wait for it with --follow",
        )
    return found


def _who(incarnation: int, wish: Wish, say: Callable[[str], None]) -> Evaluating:
    name = f"evaluation-{socket.gethostname().partition('.')[0]}-{os.getpid()}"
    return Evaluating(Recorder(_WORKER, incarnation), name, urls=wish.urls, tell=say, listener=FleetListener(tell=say))
