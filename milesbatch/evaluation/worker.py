"""The evaluation role: one process beside the others, which evaluates what the recipe says, and which nothing waits for.

Owns the setting up, and when a version counts as published: when the controller says so. Invariant: its weights are
held before torch is imported, so that a quick trainer does not retire them meanwhile.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from milesbatch.cluster.context import RoleContext
from milesbatch.decisions.origin import origin_of
from milesbatch.errors import InputError, StoppedToContinue
from milesbatch.evaluation.asking import Asking, due_versions, open_asking
from milesbatch.evaluation.evaluator import Evaluator, Generating
from milesbatch.evaluation.following import follow_versions, hold_from
from milesbatch.evaluation.generating import Evaluating, Means, open_means
from milesbatch.rollout.episodes import Recorder
from milesbatch.rollout.listening import listener_of
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run
from milesbatch.store.sight import first_sight
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.wire.client import Pulse

_POLL_S = 0.25


def main(context: RoleContext) -> None:
    """Evaluate until the last version is done, or the controller says stop.

    Raises:
        InputError: what is asked cannot be asked, or is asked in training too.
        StorageError: something cannot be read or written; a later start goes on.
    """
    pulse = Pulse(context)
    pulse.start()
    layout = RunLayout(context.run_directory)
    run = open_run(layout, context.incarnation, first_sight(layout.root))
    section = run.recipe.evaluation
    if section is None:
        raise InputError("the recipe has no section evaluation", mend="nothing: there is nothing to evaluate")
    due = due_versions(run.recipe.steps, section.every_steps, origin_of(run.record).step)
    events = EventLog(layout, context.name, context.incarnation)
    with hold_from(layout, due[0]) as held:
        asking = open_asking(run.recipe, section)
        means = open_means(run, asking, _who(context, pulse, events))
        evaluator = _evaluator(run, asking, means, pulse, events)
        watch = _Watch(pulse)
        try:
            follow_versions(layout, evaluator, due, events, held, watch.await_published, watch.began)
        except StoppedToContinue:
            return  # nothing is half done; the next start goes on
        finally:
            means.close()
            events.close()


@dataclass(slots=True)
class _Watch:
    """What the controller says of versions, and hears of this process."""

    pulse: Pulse

    def await_published(self, version: int) -> bool:
        self.pulse.state = "following"
        while self.pulse.published < version and not self.pulse.should_stop:
            self.pulse.moved()  # to wait for training is no hang
            time.sleep(_POLL_S)
        return not self.pulse.should_stop

    def began(self, version: int) -> None:
        self.pulse.state, self.pulse.policy_version = "generating", version
        self.pulse.moved()


def _who(context: RoleContext, pulse: Pulse, events: EventLog) -> Evaluating:
    def tell(text: str) -> None:
        pulse.moved()
        print(text, file=sys.stderr, flush=True)

    return Evaluating(
        Recorder(context.name, context.incarnation),
        context.name,
        f".i{context.incarnation}.{context.attempt}",
        tell=tell,
        listener=listener_of(pulse, events, tell),
    )


def _evaluator(run: OpenRun, asking: Asking, means: Means, pulse: Pulse, events: EventLog) -> Evaluator:
    began_s = time.monotonic()

    def prepare() -> Generating:
        pulse.state = "starting"
        made = means.prepare()
        events.write("ready", seconds=round(time.monotonic() - began_s, 2))
        pulse.state = "generating"
        return made

    return Evaluator(
        run.layout,
        asking,
        means.follower,
        FileMetadata.of_run(run.record),
        prepare,
        should_stop=lambda: pulse.should_stop,
        tell_progress=pulse.set_activity,
    )
