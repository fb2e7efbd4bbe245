"""Controllers, trainers and workers of several incarnations on one run directory, interleaved by an adversary.

Rules: start another controller, let a process take some operations, let a whole incarnation go on, kill a process at whatever
it is about to do, lose a controller while its processes live on. After every operation the files must agree with the model
(``world.Model``); at the end a fresh start must finish the run, and its audit must be clean.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from actors import Actor
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from world import Incarnate, Violation, World, fast_directory

from milesbatch.store.survey import Seals

MOST_INCARNATIONS = 5
FEW, MANY = 20, 600
some = st.integers(0, 14)


class Seen(Counter[str]):
    """What the runs of a machine came through, so that a test can prove that they met something."""


def machine(bitwise: bool, seen: Seen) -> type[RuleBasedStateMachine]:
    """The state machine over worlds of one kind."""

    class Interleaved(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            torch.set_num_threads(1)
            self.place = Path(tempfile.mkdtemp(prefix="interleaved-", dir=fast_directory()))
            self.world = World(self.place, bitwise=bitwise)
            self.world.begin(40)

        @precondition(lambda self: len(self.world.incarnations) < MOST_INCARNATIONS)
        @rule(count=st.sampled_from([40, 3, 4, 12, 0]))
        def another_controller(self, count: int) -> None:
            self.world.begin(count)

        @rule(which=some, count=st.sampled_from([1, 2, 3, 5, 10, 30]))
        def step(self, which: int, count: int) -> None:
            self.world.step(which, count)

        @rule(which=some, count=st.sampled_from([250, 120, 60, 20, 5]))
        def advance(self, which: int, count: int) -> None:
            self.world.advance(which, count)

        @rule(which=some)
        def advance_to_commit(self, which: int) -> None:
            self.world.advance_to_commit(which)

        @rule(which=some)
        def commit_late(self, which: int) -> None:
            self.world.commit_late(which)

        @rule(which=some)
        def kill(self, which: int) -> None:
            self.world.kill(which)

        @rule(which=some)
        def lose_controller(self, which: int) -> None:
            self.world.lose_controller(which)

        def teardown(self) -> None:
            if not hasattr(self, "world"):
                return
            try:
                seen["steps"] += len(self.world.model.batches)
                seen["incarnations"] += self.world.model.newest
                self.world.finish()
                seen["runs"] += 1
                seen.update(text.split(": ", 1)[1].split(" ")[0] for text in self.world.ended)
            finally:
                self.world.close()
                shutil.rmtree(self.place)

    return Interleaved


def search(bitwise: bool, examples: int, steps: int, *, shrink: bool = True) -> Seen:
    seen = Seen()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(bitwise, seen),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return seen


@pytest.mark.parametrize("bitwise", [True, False], ids=["bitwise", "relaxed"])
def test_no_schedule_breaks_the_protocol(bitwise: bool) -> None:
    seen = search(bitwise, FEW, 40)
    assert seen["runs"] >= FEW
    assert seen["incarnations"] > 1.5 * seen["runs"] and seen["steps"] >= seen["runs"]
    assert seen["FencedError"] > 3 and seen["StoppedToContinue"] > 3, (
        "no zombie has met the fence, or lost its controller"
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bitwise", [True, False], ids=["bitwise", "relaxed"])
def test_no_schedule_of_many_breaks_the_protocol(bitwise: bool) -> None:
    search(bitwise, MANY, 60)


# -- it can fail ----------------------------------------------------------------------------------------------------


def test_without_the_seal_the_machine_finds_a_violation() -> None:
    with mock.patch.object(Seals, "cover", lambda self, incarnation, covers: True), pytest.raises(Violation):
        search(True, 300, 40, shrink=False)


# -- schedules that once did ----------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    torch.set_num_threads(1)
    world = World(tmp_path, bitwise=True)
    yield world
    world.close()


def until(world: World, incarnate: Incarnate, name: str, place: str) -> None:
    """Let all of an incarnation go on until its process ``name`` is about to do what begins with ``place``."""
    for _ in range(5000):
        actor = incarnate.controller if name == "controller" else incarnate.roles.get(name)
        if actor is not None and actor.place.startswith(place):
            return
        for other in incarnate.actors:
            world._step(other)
            if other is actor and actor.place.startswith(place):
                return
    raise AssertionError(f"{name} never came to {place}")


def take_over(world: World) -> Incarnate:
    """Another controller, up to the point at which its processes run."""
    world.begin()
    incarnate = world.incarnations[-1]
    while not incarnate.controller.has_ended:
        world._step(incarnate.controller)
    return incarnate


def overtake(world: World, late: Actor) -> Incarnate:
    """Another controller; ``late`` takes one step after it has created its record and before its sweep."""
    newest = world.model.newest
    world.begin()
    incarnate = world.incarnations[-1]
    while world.model.newest == newest:
        world._step(incarnate.controller)
    world._step(late)
    while not incarnate.controller.has_ended:
        world._step(incarnate.controller)
    return incarnate


def until_checkpoint(world: World, incarnate: Incarnate, step: int) -> Actor:
    """Until the trainer is about to commit the checkpoint of ``step``, version ``step`` being published."""
    go_on(world, incarnate, step)
    while len(world.model.versions) <= step:
        for actor in incarnate.actors:
            world._step(actor)
    until(world, incarnate, "trainer-0", f"link {step:06d}/manifest.json")
    return incarnate.roles["trainer-0"]


def go_on(world: World, incarnate: Incarnate, steps: int) -> None:
    while len(world.model.batches) < steps:
        for actor in incarnate.actors:
            world._step(actor)


@contextmanager
def slipped_record(world: World, step: int) -> Iterator[None]:
    """The first incarnation's trainer has passed the fence with the record of ``step``, and is taken over before its link."""
    world.begin()
    first = world.incarnations[0]
    until(world, first, "trainer-0", f"link batches/{step:06d}.json")
    overtake(world, first.roles["trainer-0"])
    assert world.layout.batch(step).exists() and len(world.model.batches) == step - 1
    yield


def test_a_controller_that_wakes_up_in_its_sweep_takes_nothing_away(world: World) -> None:
    """It was about to move a zombie's record to quarantine. By now another record has that name, and it counts."""
    with slipped_record(world, 3):
        world.begin()
        asleep = world.incarnations[-1]
        until(world, asleep, "controller", "rename batches/000003.json")
        newest = take_over(world)
        go_on(world, newest, 4)
        while not asleep.controller.has_ended:
            world._step(asleep.controller)
        assert type(asleep.controller.error).__name__ == "FencedError"
        assert world.layout.batch(3).read_bytes() == world.model.batches[2]
    world.finish()


def test_the_sleeping_controller_is_found_without_the_second_look(world: World) -> None:
    with mock.patch("milesbatch.store.removal._writer_of", lambda moved: None), slipped_record(world, 3):
        world.begin()
        asleep = world.incarnations[-1]
        until(world, asleep, "controller", "rename batches/000003.json")
        go_on(world, take_over(world), 4)
        with pytest.raises(Violation, match=r"batches/000003.json counts, and is gone"):
            world._step(asleep.controller)


def sleeping_publisher(world: World) -> tuple[Incarnate, Incarnate]:
    """A trainer has committed version 3 after it was sealed out, and sleeps; the next one has published its own."""
    world.begin()
    first = world.incarnations[0]
    until(world, first, "trainer-0", "link 000003/manifest.json")
    second = overtake(world, first.roles["trainer-0"])
    assert first.roles["trainer-0"].place.startswith("unlink 000003/.tmp-")
    while len(world.model.versions) < 4:
        for actor in second.actors:
            world._step(actor)
    return first, second


def test_a_publisher_that_wakes_up_removes_only_its_own_leftovers(world: World) -> None:
    first, _ = sleeping_publisher(world)
    while not first.roles["trainer-0"].has_ended:
        world._step(first.roles["trainer-0"])
    world.finish()


def test_the_sleeping_publisher_is_found_when_it_removes_all(world: World) -> None:
    first, _ = sleeping_publisher(world)
    with (
        mock.patch("milesbatch.weights.publisher._payload_writer", lambda name: 1),
        pytest.raises(Violation, match="is needed, and is gone"),
    ):
        while not first.roles["trainer-0"].has_ended:
            world._step(first.roles["trainer-0"])


def test_a_trainer_that_was_replaced_retires_nothing(world: World) -> None:
    """Its checkpoint came after the seal; what the seal accepts stays."""
    world.begin()
    first = world.incarnations[0]
    trainer = until_checkpoint(world, first, 6)
    overtake(world, trainer)
    while not trainer.has_ended:
        world._step(trainer)
    assert type(trainer.error).__name__ == "FencedError"
    assert sorted(world.model.checkpoints) == [2, 4]
    assert all(world.layout.checkpoint_manifest(step).exists() for step in (2, 4))
    world.finish()
