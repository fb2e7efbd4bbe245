"""Several incarnations at work on one run directory, each process stepped operation by operation, beside a model of it.

    World.begin() ──> a controller takes over ──> its trainer and workers ──> advance(), step(), kill(), lose_controller() ...
    World.finish() ──> everybody is killed, one more start goes on to the end, and the model is compared once more

The protocol is the real one, with the stand-ins of the crash tests; samples depend on the incarnation that drew them, so that
data of the wrong incarnation shows in every later weights digest. The model (:class:`Model`) is right by being
trivial: a list of accepted batch records, a list of accepted versions, and the accepted checkpoints.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from actors import Actor, SteppedOperations, pause
from crash_life import Life, Script, live_to_the_end, make_run
from crash_log import QuickOperations
from crash_scene import HashEngine, crash_recipe

from milesbatch.audit.prove import audit_run
from milesbatch.controller.hub import Hub
from milesbatch.decisions.fates import FateTable
from milesbatch.engines.protocol import PolicyWeights
from milesbatch.errors import DivergenceError, FencedError, MilesbatchError, RunHeldError, StoppedToContinue
from milesbatch.ids import parse_number
from milesbatch.recipe.models import Recipe
from milesbatch.records import BatchRecord, CheckpointManifest, IncarnationRecord, Record, WeightsManifest
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import installed
from milesbatch.store.run import open_run
from milesbatch.store.takeover import Claimant, Incarnation, take_over
from milesbatch.trajectories.groups import group_refs
from milesbatch.weights.reader import is_retired

_COMMITS = ("link batches/", "link 0")
"""Places of actors that are about to commit a batch record, or a manifest of a version or a checkpoint."""


class Violation(AssertionError):
    """The run is not what the model says."""


@dataclass
class Model:
    """What counts. Told of each name that comes to be, by whom; asked after each move whether the files agree."""

    layout: RunLayout
    batches: list[bytes] = field(default_factory=list)
    """Of steps 1, 2 ..."""
    versions: list[bytes] = field(default_factory=list)
    """Manifests of versions 0, 1 ..."""
    checkpoints: dict[int, bytes] = field(default_factory=dict)
    newest: int = 0
    """Newest incarnation."""
    taking: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Actor -> how many batches and versions counted when it began to take over."""
    retired: set[int] = field(default_factory=set)
    """Checkpoints that were gone when they were sealed."""
    is_checked: bool = False
    _files: dict[bytes, list[str]] = field(default_factory=dict)

    def committed(self, actor: Actor | None, path: Path) -> None:
        """``path`` has just come to be."""
        if path.parent == self.layout.incarnations:
            self._sealed(actor, IncarnationRecord.from_bytes(path.read_bytes(), path.name))
        elif actor is not None and actor.incarnation == self.newest:
            kind = path.parent.parent
            if path.parent == self.layout.batches:
                self._append(self.batches, parse_number(path.stem) - 1, path)
            elif kind == self.layout.weights and path.name == "manifest.json":
                self._append(self.versions, parse_number(path.parent.name), path)
            elif kind == self.layout.checkpoints:
                self.checkpoints[parse_number(path.parent.name)] = path.read_bytes()
                self.retired.discard(parse_number(path.parent.name))

    def _append(self, accepted: list[bytes], index: int, path: Path) -> None:
        if index != len(accepted):
            raise Violation(f"{path} was committed, {len(accepted)} of its kind count")
        accepted.append(path.read_bytes())
        if accepted is self.batches:
            FateTable.of(BatchRecord.from_bytes(data, "") for data in accepted)  # raises for a second fate

    def _sealed(self, actor: Actor | None, record: IncarnationRecord) -> None:
        seal = record.seal
        if record.incarnation != self.newest + 1:
            raise Violation(f"incarnation {record.incarnation} follows {self.newest}")
        floor = self.taking.get(id(actor), (0, 0))
        if not floor[0] <= seal.last_batch <= len(self.batches):
            raise Violation(f"the seal {seal} misses records: {floor[0]} to {len(self.batches)} count")
        if not floor[1] - 1 <= seal.last_version <= len(self.versions) - 1:
            raise Violation(f"the seal {seal} misses versions: up to {floor[1] - 1} .. {len(self.versions) - 1} count")
        if not set(seal.checkpoints) <= set(self.checkpoints):
            raise Violation(f"the seal {seal} accepts checkpoints that do not count: {sorted(self.checkpoints)}")
        self.newest = record.incarnation
        counts = (seal.last_batch, seal.last_version + 1)
        self.taking = {who: (min(b, counts[0]), min(v, counts[1])) for who, (b, v) in self.taking.items()}
        del self.batches[seal.last_batch :], self.versions[seal.last_version + 1 :]
        sealed = {step: self.checkpoints[step] for step in seal.checkpoints}
        # A trainer that went on between the survey and the seal may have retired one that was found.
        self.retired |= {step for step in sealed if not self.layout.checkpoint_manifest(step).exists()}
        self.checkpoints = {step: data for step, data in sealed.items() if step not in self.retired}

    def changed(self, path: Path) -> None:
        """A name was given, taken away or moved."""
        self.is_checked = self.is_checked and path.name.startswith(TEMPORARY_PREFIX)

    def check(self) -> None:
        """The accepted artefacts are there, byte for byte."""
        if self.is_checked:
            return
        self.is_checked = True
        layout = self.layout
        for step, data in enumerate(self.batches, 1):
            self._expect(layout.batch(step), data)
        for version, data in enumerate(self.versions):
            self._expect(layout.weights_manifest(version), data)
            if not is_retired(layout, version):
                self._expect_files(layout.weights_version(version), self._named(WeightsManifest, data))
        if self.checkpoints:  # retention deletes older ones only
            newest = max(self.checkpoints)
            self._expect(layout.checkpoint_manifest(newest), self.checkpoints[newest])
            named = self._named(CheckpointManifest, self.checkpoints[newest])
            self._expect_files(layout.checkpoint(newest), named)
        for data in self.batches:
            self._expect_files(layout.trajectories, self._named(BatchRecord, data))

    def _named(self, kind: type[Record], data: bytes) -> list[str]:
        """Files that a record needs."""
        if data not in self._files:
            record: Any = kind.from_bytes(data, "")
            refs = record.trained if kind is BatchRecord else record.files
            self._files[data] = [ref.path for ref in refs]
        return self._files[data]

    def _expect(self, path: Path, data: bytes) -> None:
        if not path.exists():
            raise Violation(f"{path} counts, and is gone")
        if path.read_bytes() != data:
            raise Violation(f"{path} counts, and is another one now")

    def _expect_files(self, directory: Path, names: list[str]) -> None:
        gone = [name for name in names if not (directory / name).exists()]
        if gone:
            raise Violation(f"{directory / gone[0]} is needed, and is gone")


class SaltedEngine(HashEngine):
    """Draws other tokens in each incarnation."""

    def __init__(self, incarnation: int) -> None:
        super().__init__()
        self._incarnation = incarnation

    def activate(self, weights: PolicyWeights) -> float:
        paused_s = super().activate(weights)
        self._digest += f"/{self._incarnation}"
        return paused_s


class SteppedLife(Life):
    """An incarnation whose roles are actors of their own. Whoever asks the hub waits for his turn first."""

    def __init__(self, *args: Any) -> None:
        self.is_lost = False
        """Whether its controller has died: nobody answers any more."""
        super().__init__(*args)

    @property
    def hub(self) -> Hub:
        pause("ask the controller")
        if self.is_lost:
            raise StoppedToContinue("the controller does not answer")
        return self._hub

    @hub.setter
    def hub(self, hub: Hub) -> None:
        self._hub = hub

    def work(self) -> bool:
        return True  # others do

    def lose(self, name: str, block: int) -> None:
        return

    def work_for_ever(self, index: int) -> None:
        worker, side = self._worker(index)
        worker._engine = SaltedEngine(self._incarnation)
        while not self.hub.is_finished:
            side.turn(worker)


@dataclass
class Incarnate:
    """A controller, and the processes that it started."""

    controller: Actor
    life: SteppedLife | None = None
    roles: dict[str, Actor] = field(default_factory=dict)

    @property
    def actors(self) -> list[Actor]:
        return [actor for actor in (self.controller, *self.roles.values()) if not actor.has_ended]


class World:
    """One run directory, and everybody who works on it."""

    def __init__(self, root: Path, *, bitwise: bool) -> None:
        self.layout, self.recipe = RunLayout(root / "run"), _recipe(bitwise)
        self.model = Model(self.layout)
        self.incarnations: list[Incarnate] = []
        self.ended: list[str] = []
        """How processes ended."""
        self._stack = contextlib.ExitStack()
        operations = SteppedOperations(self.model.committed, self.model.changed)
        # Whoever is asked for is taken for dead: a take-over may come at any moment.
        self._stack.enter_context(mock.patch("milesbatch.store.takeover.is_alive", lambda *who: False))
        with installed(QuickOperations()):
            make_run(self.layout, self.recipe)
        self._stack.enter_context(installed(operations))

    # -- moves ------------------------------------------------------------------------------------------------------

    def begin(self, count: int = 0) -> None:
        """Another controller starts, and takes ``count`` steps."""
        incarnate = Incarnate.__new__(Incarnate)
        controller = Actor("controller", 0, lambda: self._take_over(incarnate))
        incarnate.__init__(controller)  # type: ignore[misc]
        self.model.taking[id(controller)] = (len(self.model.batches), len(self.model.versions))
        self.incarnations.append(incarnate)
        for _ in range(count):
            self._step(controller)

    def step(self, which: int, count: int) -> None:
        """One process takes ``count`` steps."""
        actors = self._actors()
        if actors:
            actor = actors[which % len(actors)]
            for _ in range(count):
                self._step(actor)

    def advance(self, which: int, count: int) -> None:
        """All processes of one incarnation take steps in turn, ``count`` together."""
        for _ in range(count):
            actors = self.incarnations[which % len(self.incarnations)].actors
            if not actors:
                return
            self._step(actors[_ % len(actors)])

    def advance_to_commit(self, which: int) -> None:
        """All processes of one incarnation go on until one of them is about to commit a record or a manifest."""
        incarnate = self.incarnations[which % len(self.incarnations)]
        for count in range(400):
            if any(actor.place.startswith(_COMMITS) for actor in incarnate.actors) or not incarnate.actors:
                return
            self._step(incarnate.actors[count % len(incarnate.actors)])

    def commit_late(self, which: int) -> None:
        """Of those who are about to commit, in an incarnation that is no longer the newest, one does."""
        late = [a for a in self._actors() if a.place.startswith(_COMMITS) and a.incarnation < self.model.newest]
        if late:
            self._step(late[which % len(late)])

    def kill(self, which: int) -> None:
        """One process dies; the controller, if it lives, starts the role again."""
        actors = self._actors()
        if actors:
            actors[which % len(actors)].kill()
            self._start_roles()
            self.model.check()

    def lose_controller(self, which: int) -> None:
        """A controller dies; its roles go on until they ask it for something."""
        life = self.incarnations[which % len(self.incarnations)].life
        if life is not None:
            life.is_lost = True

    def finish(self) -> None:
        """Nobody is left; a fresh start goes on to the end."""
        try:
            self.kill_all()
            before = len(self.model.batches)
            with installed(_Watched(self.model)):
                self.model.taking[id(None)] = (before, len(self.model.versions))
                with mock.patch.object(Life, "run", _as_newest(self.model)):
                    live_to_the_end(self.layout, self.recipe)
            self.model.is_checked = False
            self.model.check()
            gone = [
                str(self.layout.checkpoint_manifest(step).relative_to(self.layout.root)) for step in self.model.retired
            ]
            violations = [v for v in audit_run(self.layout).violations if v.path not in gone]
            if violations:
                raise Violation(f"audit: {violations[0]}")
        finally:
            self.close()

    def kill_all(self) -> None:
        for incarnate in self.incarnations:
            for actor in (incarnate.controller, *incarnate.roles.values()):
                actor.kill()

    def close(self) -> None:
        self.kill_all()
        self._stack.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _actors(self) -> list[Actor]:
        return [actor for incarnate in self.incarnations for actor in incarnate.actors]

    def _step(self, actor: Actor) -> None:
        actor.step()
        if actor.has_ended:
            self._judge(actor)
            self._start_roles()
        self.model.check()

    def _judge(self, actor: Actor) -> None:
        """May a process end like this? A zombie may end with any error that says what it met."""
        error = actor.error
        self.ended.append(f"{actor.name}: {type(error).__name__} {error}")
        expected = (FencedError, RunHeldError, StoppedToContinue)
        is_newest = actor.incarnation == self.model.newest
        if error is None or isinstance(error, expected):
            return
        if not isinstance(error, MilesbatchError) or (is_newest and isinstance(error, DivergenceError)):
            raise Violation(f"{actor.name} of incarnation {actor.incarnation} ended at {actor.place}") from error

    def _take_over(self, incarnate: Incarnate) -> None:
        taken = take_over(self.layout, Claimant(), {})
        incarnate.controller.incarnation = taken.number
        incarnate.life = self._life(taken)

    def _life(self, taken: Incarnation) -> SteppedLife:
        hub = Hub(self.recipe)
        ready = [ref for name in taken.found.ready_files for ref in group_refs(self.layout.trajectory(name))]
        hub.restore(taken.found.fates, ready, taken.found.last_version)
        life = SteppedLife.__new__(SteppedLife)
        life._workers_wanted = 0  # type: ignore[attr-defined]
        with mock.patch.object(SteppedLife, "_worker", lambda self, index: None):
            life.__init__(open_run(self.layout, taken.number), taken.number, hub, Script(), EventLog, self._stack)  # type: ignore[misc]
        return life

    def _start_roles(self) -> None:
        for incarnate in self.incarnations:
            life = incarnate.life
            if life is None or life.is_lost or life._hub.is_finished:
                continue
            mains: dict[str, Callable[[], None]] = {"trainer-0": life.run}
            for index in range(self.recipe.rollout.workers):
                mains[f"rollout-{index}"] = partial(life.work_for_ever, index)
            for name, main in mains.items():
                old = incarnate.roles.get(name)
                if old is not None and (not old.has_ended or isinstance(old.error, FencedError)):
                    continue
                life._hub.forget(name)
                number = incarnate.controller.incarnation
                incarnate.roles[name] = Actor(f"{name}.i{number}", number, main)


class _Watched(QuickOperations):
    """Unstepped operations that tell the model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._model.committed(_newest_actor.get("actor"), target)


_newest_actor: dict[str, Actor] = {}


def _as_newest(model: Model) -> Callable[[Life], None]:
    """``Life.run`` of the last life, whose commits are those of the newest incarnation."""
    run = Life.run

    def run_as_newest(life: Life) -> None:
        actor = Actor.__new__(Actor)
        actor.incarnation = model.newest
        _newest_actor["actor"] = actor
        try:
            run(life)
        finally:
            _newest_actor.clear()

    return run_as_newest


def _recipe(bitwise: bool) -> Recipe:
    return crash_recipe().model_copy(update={"determinism": "bitwise" if bitwise else "relaxed"})


def fast_directory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112
