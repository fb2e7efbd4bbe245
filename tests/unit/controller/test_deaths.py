"""Which of the trainer's ranks is recorded as the cause, when they die together or one after the other."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from builders import make_layout, make_recipe
from ended_by_hand import EndedByHand

from milesbatch.cluster.context import RoleContext
from milesbatch.controller import supervise
from milesbatch.controller.hub import Hub
from milesbatch.controller.supervise import Supervisor
from milesbatch.errors import RunFailedError
from milesbatch.store.events import EventLog, read_events


class Ranks:
    """Starts ranks on nodes ``n0`` and on, and remembers the newest of each name."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.running: dict[str, EndedByHand] = {}

    def has(self, role: str) -> bool:
        return role == "trainer"

    def node_of(self, context: RoleContext) -> str:
        return f"n{context.index}"

    def is_lost(self, context: RoleContext) -> bool:
        return False

    def start(self, context: RoleContext, threads: int) -> EndedByHand:
        self.running[context.name] = EndedByHand()
        return self.running[context.name]


@pytest.fixture
def launcher() -> Ranks:
    return Ranks()


@pytest.fixture
def supervisor(tmp_path: Path, launcher: Ranks, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(supervise, "_SETTLE_S", 0.2)
    layout = make_layout(tmp_path / "run")
    recipe = make_recipe(trainer={"ranks": 2}, slurm={"max_restarts_without_progress": 0}, tracking={"kind": "none"})
    base = RoleContext(layout.root, "trainer", 0, 1, 1, 1, "http://127.0.0.1:1", "token", 1, 1.0)
    events = EventLog(layout, "controller-0", 1)
    made = Supervisor(layout, recipe, Hub(recipe), launcher, base, events)
    made.start_all()
    layout.log("trainer-0", 1).write_text("error: a peer went away\n")
    layout.log("trainer-1", 1).write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\n")
    return made


def cause(supervisor: Supervisor) -> str:
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s:
        try:
            supervisor.look()
        except RunFailedError as error:
            return str(error)
        time.sleep(0.02)
    raise AssertionError("no death was acted upon")


def test_found_dead_together_the_killed_one_is_the_cause(supervisor: Supervisor, launcher: Ranks) -> None:
    launcher.running["trainer-0"].code, launcher.running["trainer-1"].code = 1, -signal.SIGKILL
    said = cause(supervisor)
    assert "trainer-1 on n1 died" in said and "killed by SIGKILL, out of memory" in said
    assert "memory_gib" in said


def test_one_that_shows_its_death_later_is_still_the_cause(
    supervisor: Supervisor, launcher: Ranks, tmp_path: Path
) -> None:
    launcher.running["trainer-0"].code = 1
    assert supervisor.look() == []
    launcher.running["trainer-1"].code = -signal.SIGSEGV
    assert "trainer-1 on n1 died" in cause(supervisor)
    log = supervise.RunLayout(tmp_path / "run").event_log("controller-0", 1)
    first = next(event for event, _ in read_events(log) if event["event"] == "process_ended")
    assert (first["name"], first["host"]) == ("trainer-1", "n1")


def test_an_error_that_stays_alone_is_acted_upon(supervisor: Supervisor, launcher: Ranks) -> None:
    launcher.running["trainer-0"].code = 1
    assert "trainer-0 on n0 died" in cause(supervisor)
