"""A whole run whose processes are all on different hosts of one shared filesystem: the real protocol, in one thread.

    run_on_hosts() ──> live() once and again ──> controller on head-1, trainer-0, rollout-0, rollout-1 on hosts of their own;
                                                  killed at a mutation; again, on new hosts; ... until it is finished

A process that ends with an error is started again on a new host, as the supervisor does, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_life import Life, Script, live
from crash_log import Killed
from crash_scene import STEPS, crash_recipe
from crash_search import TWIN_REASONS, Ending, ending_of
from shared_filesystem import SharedFilesystem

from milesbatch.audit.prove import audit_run
from milesbatch.errors import MilesbatchError, RunHeldError, StorageError
from milesbatch.recipe.models import Recipe
from milesbatch.report.status import is_finished
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run
from milesbatch.store.sight import Sight, first_sight

WAIT_S = 90.0
_MOST_LIVES, _MOST_RESTARTS = 12, 10


def hosts_recipe() -> Recipe:
    """That of the crash tests, with the waits of production."""
    recipe = crash_recipe()
    return recipe.model_copy(update={"slurm": recipe.slurm.model_copy(update={"visible_wait_s": WAIT_S})})


@dataclass
class Story:
    """What happened to a run."""

    lives: int = 0
    kills: int = 0
    waits: list[str] = field(default_factory=list)
    """What the controllers said while they looked for something."""
    errors: list[tuple[str, MilesbatchError]] = field(default_factory=list)
    """Of processes that ended with one, and were started again."""

    def unexpected(self) -> list[str]:
        """Errors that no mishap of an operation explains, so that something was not waited for, or taken for what it is not.

        A lost reply or a refusal ends a process with a clear error at most; of two who cannot see each other one stops.
        """
        allowed = (StorageError, RunHeldError)
        return [f"{who}: {e}" for who, e in self.errors if not isinstance(e, allowed) or e.unseen is not None]


def run_on_hosts(shared: SharedFilesystem, *, kills: int) -> Story:
    """Live until the run is finished, killed at ``kills`` random mutations."""
    story, recipe, draw = Story(), hosts_recipe(), random.Random(shared.seed)
    left: Iterator[int] = iter([])

    def pause(operation: str, path: Path) -> None:
        nonlocal left
        if next(left, None) is None:
            story.kills += 1
            left = iter(range(10**9))
            raise Killed(f"{operation} {path}")

    shared.pause = pause
    while not is_finished(RunLayout(shared.truth / "run"), recipe.steps):
        story.lives += 1
        assert story.lives <= _MOST_LIVES, f"the run does not come to its end: {[f'{w}: {e}' for w, e in story.errors]}"
        left = iter(range(draw.randrange(40, 260) if story.kills < kills else 10**9))
        host = shared.mount(f"head-{story.lives % 2}")  # the other one remembers what it saw a life ago
        try:
            live(
                RunLayout(host / "run"),
                recipe,
                Script(),
                life=_hosted(shared, story),
                sight=Sight(WAIT_S, story.waits.append),
            )
        except Killed:
            continue
        except MilesbatchError as error:
            story.errors.append((f"life {story.lives}", error))
    return story


def problems_of(shared: SharedFilesystem, expected: Ending, *, may_lose: bool = False) -> list[str]:
    """What is wrong with a finished run, looked at where everything is seen."""
    layout = RunLayout(shared.truth / "run")
    found, problems = ending_of(layout), []
    if found.digests != expected.digests:
        problems.append(f"weights digests {found.digests}, expected {expected.digests}")
    if found.fates != expected.fates:
        problems.append(f"fates {found.fates}, expected {expected.fates}")
    problems += [f"audit: {finding}" for finding in audit_run(layout).violations]
    problems += [] if may_lose else quarantine_problems(layout)
    return problems


def quarantine_problems(layout: RunLayout) -> list[str]:
    """Everything in quarantine, but blocks that were made twice."""
    problems = []
    for path in sorted(layout.quarantine.iterdir()):
        if not path.name.endswith(".reason.txt") and not path.name.startswith(("trajectories.", ".")):
            reason = path.with_name(path.name + ".reason.txt")
            text = reason.read_text().strip() if reason.exists() else "?"
            if text not in TWIN_REASONS and TEMPORARY_PREFIX not in path.name:
                problems.append(f"quarantined: {path.name}: {text}")
    return problems


def _hosted(shared: SharedFilesystem, story: Story) -> type[Life]:
    """A kind of life with each process on a host of its own."""

    class HostedLife(Life):
        def __init__(self, run: OpenRun, *args: Any) -> None:
            self._hosts: dict[str, OpenRun] = {}
            self._starts = 0
            super().__init__(run, *args)

        def run_of(self, name: str) -> OpenRun:
            if name not in self._hosts:
                self._starts += 1
                layout = RunLayout(shared.mount(f"{name}-on-{(self._starts + story.lives) % 3}") / "run")
                self._hosts[name] = open_run(layout, self._incarnation, first_sight(layout.root))
            return self._hosts[name]

        def run(self) -> None:
            while True:
                try:
                    return super().run()
                except MilesbatchError as error:
                    self._again("trainer-0", error)

        def work(self) -> bool:
            while True:
                index = self._turn
                try:
                    return super().work()
                except MilesbatchError as error:
                    # The worker whose turn it was; ``_turn`` has gone on to the next.
                    name = f"rollout-{(self._turn - 1) % len(self.workers)}"
                    self._again(name, error)
                    self.hub.forget(name)
                    self._turn = index
                    self.workers[int(name.removeprefix("rollout-"))] = self._worker(int(name.removeprefix("rollout-")))

        def _again(self, name: str, error: MilesbatchError) -> None:
            story.errors.append((f"life {story.lives}, {name}", error))
            if not error.may_restart or len(story.errors) > _MOST_RESTARTS:
                raise error
            self._hosts.pop(name)

    return HostedLife


__all__ = ["STEPS", "WAIT_S", "Story", "hosts_recipe", "problems_of", "quarantine_problems", "run_on_hosts"]
