"""One incarnation of a small run in one thread: the real protocol code around the stand-ins of ``crash_scene``.

    live() ──> make or open the run ──> take over ──> TrainerLoop.run()
                                                        └── asks for a batch ──> the workers take turns, one block each

The order of all mutations is fixed. A controller that answers from the hub without HTTP is all that is replaced of the wire.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

from crash_scene import CharacterTokenizer, HashBackend, HashEngine, Late, SlowSaver

from milesbatch.cluster.context import RoleContext
from milesbatch.controller.hub import Hub
from milesbatch.environments.prompts import open_prompts
from milesbatch.errors import StorageError
from milesbatch.recipe.models import Recipe
from milesbatch.records import RunRecord, digest_bytes
from milesbatch.report.status import cause_of_restart, is_finished
from milesbatch.rollout.episodes import EpisodeRunner, Recorder
from milesbatch.rollout.loop import WorkerLoop
from milesbatch.rollout.reaching import open_follower
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.durable import AlreadyExistsError, publish_file, remove_file
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import LivenessHint
from milesbatch.store.run import OpenRun, open_run, read_run_record
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.store.survey import read_incarnations
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.trainer.checkpointing import Checkpointer
from milesbatch.trainer.loop import TrainerLoop
from milesbatch.trajectories.groups import group_refs
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.weights.team import Alone
from milesbatch.wire import messages as wire

T = TypeVar("T")
OpenEvents = Callable[[RunLayout, str, int], EventLog]
_MODEL_FILES = {"config.json": b'{"model_type": "stand-in"}\n', "tokenizer.json": b'{"vocab": {}}\n'}


@dataclass(frozen=True, slots=True)
class Script:
    """What happens in a life besides work."""

    stop_after: int | None = None
    """The controller says stop once this step is trained."""
    slow_block: int | None = None
    """The worker that wrote this block is taken for lost before it can say so; another makes the block meanwhile."""
    publishes_at_once: bool = False
    """Versions are committed before the next step begins; else as late as they may."""


class Silent:
    """A pulse without a heart: the attributes that the loops set."""

    def __init__(self) -> None:
        self.state, self.policy_version, self.samples_in_flight = "starting", -1, 0
        self.published, self.should_stop = -1, False

    def moved(self, amount: int = 1) -> None:
        return

    def set_activity(self, counter: int) -> None:
        return

    def waits_for_space(self, text: str) -> None:
        return


def live(
    layout: RunLayout,
    recipe: Recipe,
    script: Script = Script(),
    open_events: OpenEvents = EventLog,
    life: type[Life] | None = None,
    sight: Sight = AT_ONCE,
) -> None:
    """What ``milesbatch run`` does, once; ``life`` may be another kind of :class:`Life`."""
    sight.until_seen(lambda: read_run_record(layout) or make_run(layout, recipe))
    sight.until_seen(lambda: read_incarnations(layout))
    if is_finished(layout, recipe.steps):
        return
    # Every life is in this process; by its record, the controller of the life before has ended.
    with mock.patch("milesbatch.store.takeover.process_started", lambda: "a process that has ended"):
        incarnation = take_over(layout, Claimant(cause=cause_of_restart(layout)), {}, sight=sight)
    found = incarnation.found
    hub = Hub(recipe)
    ready = [ref for name in found.ready_files for ref in group_refs(layout.trajectory(name))]
    hub.restore(found.fates, ready, found.last_version)
    with contextlib.suppress(StorageError):
        LivenessHint(layout, incarnation.number, "http://nowhere").beat()
    with contextlib.ExitStack() as stack:
        run = open_run(layout, incarnation.number, sight)
        (life or Life)(run, incarnation.number, hub, script, open_events, stack).run()


def live_to_the_end(layout: RunLayout, recipe: Recipe) -> None:
    """The same command again until the run is finished; one should do."""
    live(layout, recipe)
    assert is_finished(layout, recipe.steps), "one start did not finish the run"


def make_run(layout: RunLayout, recipe: Recipe) -> RunRecord:
    lay_out(layout, recipe)
    for name, data in _MODEL_FILES.items():  # as models/prepare.py does
        try:
            publish_file(layout.model / name, data)
        except AlreadyExistsError:
            remove_file(layout.model / name)
            publish_file(layout.model / name, data)
    names = ("model", "tokenizer", "chat_template", "data", "reward")
    return commit_run(layout, recipe, {name: digest_bytes(name.encode()) for name in names})


class Life:
    """The roles of one incarnation."""

    def __init__(
        self,
        run: OpenRun,
        incarnation: int,
        hub: Hub,
        script: Script,
        open_events: OpenEvents,
        stack: contextlib.ExitStack,
    ) -> None:
        self.run_, self.hub, self.script, self._incarnation = run, hub, script, incarnation
        self._open_events, self._stack = open_events, stack
        self.workers = [self._worker(index) for index in range(run.recipe.rollout.workers)]
        self._turn = 0
        self._slow_block = script.slow_block

    def run(self) -> None:
        context = self._context("trainer", 0, 1)
        run, events = self.run_of(context.name), self._events(context)
        controller: Any = _TrainerSide(self)
        pulse: Any = Silent()
        late = Late(at_once=self.script.publishes_at_once)
        loop = TrainerLoop(context, run, HashBackend(), controller, pulse, events, Alone(), late)
        keep = run.recipe.checkpoint.keep
        checkpointer = Checkpointer(run.layout, loop.fence, SlowSaver(), 0, 1, keep, loop.patience)
        events.write("ready", seconds=0.0)
        loop.run(checkpointer)

    def run_of(self, name: str) -> OpenRun:
        """The run as the process ``name`` sees it: here all are on one host."""
        return self.run_

    def work(self) -> bool:
        """The next worker makes a block; False when no worker found one."""
        for _ in self.workers:
            worker, controller = self.workers[self._turn]
            self._turn = (self._turn + 1) % len(self.workers)
            if controller.turn(worker):
                return True
        return False

    def lose(self, name: str, block: int) -> None:
        """The worker ``name``, which has just written ``block``, is taken for lost; the others make the block again."""
        if block == self._slow_block:
            self._slow_block = None
            self.hub.forget(name)
            assert self.work()

    def _worker(self, index: int) -> tuple[WorkerLoop, _WorkerSide]:
        context = self._context("rollout", index, self.run_.recipe.rollout.workers)
        run, tokenizer = self.run_of(context.name), CharacterTokenizer()
        recorder = Recorder(context.name, context.incarnation)
        runner = EpisodeRunner(run.recipe, open_prompts(run.recipe), tokenizer, (), recorder)
        fingerprints = run.record.fingerprints
        metadata = FileMetadata(run.record.run_id, fingerprints["tokenizer"], fingerprints["chat_template"])
        silent = Silent()
        side = _WorkerSide(self, context.name, silent)
        side.beat("waiting")
        controller: Any = side
        pulse: Any = silent
        follower, events = open_follower(run, self._incarnation, lambda text: None), self._events(context)
        loop = WorkerLoop(context, run, HashEngine(), runner, follower, controller, pulse, events, metadata)
        return loop, side

    def _events(self, context: RoleContext) -> EventLog:
        return self._stack.enter_context(
            contextlib.closing(self._open_events(self.run_of(context.name).layout, context.name, context.incarnation))
        )

    def _context(self, role: str, index: int, count: int) -> RoleContext:
        return RoleContext(
            run_directory=self.run_of(f"{role}-{index}").layout.root,
            role=role,
            index=index,
            count=count,
            incarnation=self._incarnation,
            attempt=1,
            controller_url="",
            token="",
            parent_pid=0,
            heartbeat_s=1.0,
        )


class _WorkerSide:
    """A worker's controller: one block a turn, then ``stop``, which hands the thread back."""

    def __init__(self, life: Life, name: str, pulse: Silent) -> None:
        self._life, self._name, self._pulse, self._may_take = life, name, pulse, False
        self._took = False

    def turn(self, worker: WorkerLoop) -> bool:
        self._may_take, self._took = True, False
        worker.run()
        self.beat(self._pulse.state)
        return self._took

    def beat(self, state: str) -> None:
        version = self._pulse.policy_version
        self._life.hub.heartbeat(
            wire.Heartbeat(
                name=self._name,
                attempt=1,
                host="",
                state=state,
                policy_version=version,
                samples_in_flight=0,
                activity=0,
            )
        )

    def lease(self, holding: Sequence[int], policy_version: int) -> wire.LeaseAnswer:
        if not self._may_take:
            return wire.LeaseAnswer(stop=not holding)  # in relaxed mode it asks for more while it works
        self._may_take = False
        request = wire.LeaseRequest(name=self._name, wait_s=0.0, holding=tuple(holding), policy_version=policy_version)
        answer = _now(self._life.hub.lease(request))
        self._took = bool(answer.groups)
        return answer if self._took else wire.LeaseAnswer(stop=not holding)

    def unreachable(self, version: int, what: str) -> bool:
        message = wire.Unreachable(name=self._name, version=version, what=what, wait_s=0.0)
        return _now(self._life.hub.report_unreachable(message)).pending

    def commit(self, request: wire.CommitRequest) -> bool:
        self._life.lose(self._name, request.block)
        return self._life.hub.commit(request).accepted


class _TrainerSide:
    """The trainer's controller: while it waits for a batch, the workers work, and one block ahead where they may."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def batch(self, step: int) -> wire.BatchAnswer:
        life = self._life
        if life.script.stop_after is not None and step > life.script.stop_after:
            life.hub.stop()
        request = wire.BatchRequest(step=step, wait_s=0.0)
        while True:
            answer = _now(life.hub.batch(request))
            if answer.stop or answer.ready:
                life.work()
                return answer
            assert life.work(), f"step {step} waits for {answer.missing} groups, and no worker is given one"

    def regenerate(self, groups: tuple[int, ...]) -> wire.RegenerateAnswer:
        raise AssertionError(f"groups {groups} were trained on, and a crash lost their file")

    def ask(self, path: str, message: wire.Message, kind: type[wire.Message]) -> wire.Message:
        hub = self._life.hub
        if path == "to-publish-again":
            return hub.to_publish_again()
        if isinstance(message, wire.Checkpointed):
            return wire.CheckpointedAnswer(oldest_held=hub.oldest_held())
        assert path == "pending"
        return wire.PendingAnswer(groups=tuple(hub.ready[group_id] for group_id in sorted(hub.ready)))

    def tell(self, path: str, message: wire.Message) -> None:
        hub = self._life.hub
        if isinstance(message, wire.Recorded):
            hub.recorded(message)
        elif isinstance(message, wire.Published):
            hub.publish(message)
        elif isinstance(message, wire.Finished):
            hub.finish()


def _now(question: Coroutine[Any, Any, T]) -> T:
    """The answer of a question that does not have to wait."""
    try:
        question.send(None)
    except StopIteration as answered:
        value: T = answered.value
        return value
    raise AssertionError("the hub waits, although it was asked not to")
