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
from milesbatch.decisions.restarts import RestartPolicy
from milesbatch.errors import EXIT_NO_RESTART, RunFailedError
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


@pytest.mark.parametrize(
    ("log", "said", "mend"),
    [
        (
            "error: cannot use /x\n  what to do: check the filesystem, then give the same command again\n",
            "cannot use /x",
            "check the filesystem, then give the same command again; the whole story is in {log}",
        ),
        (
            "error: a server refused\n  what to do: see rollout.sglang.arguments\n",
            "a server refused",
            "see rollout.sglang.arguments; read {log}; then give the same command again",
        ),
        ("KeyError: 3\n", "KeyError: 3", "mend the cause; read {log}; then give the same command again"),
    ],
)
def test_what_to_do_is_said_once(
    supervisor: Supervisor, launcher: Ranks, tmp_path: Path, log: str, said: str, mend: str
) -> None:
    path = supervise.RunLayout(tmp_path / "run").log("trainer-0", 1)
    path.write_text(log)
    launcher.running["trainer-0"].code = 1
    assert cause(supervisor) == (
        "trainer-0 on n0 died 1 times without a new train step; the last time: exit status 1\n"
        f"  it said: {said}\n  what to do: {mend.format(log=path)}"
    )


def test_what_cannot_be_helped_by_a_restart_is_told_in_the_roles_words(
    supervisor: Supervisor, launcher: Ranks, tmp_path: Path
) -> None:
    text = "error: cannot write /x\n  what to do: make it writable again\n"
    supervise.RunLayout(tmp_path / "run").log("trainer-0", 1).write_text(text)
    launcher.running["trainer-0"].code = EXIT_NO_RESTART
    with pytest.raises(RunFailedError) as caught:
        supervisor.look()
    assert str(caught.value) == "cannot write /x\n  what to do: make it writable again"


@pytest.mark.parametrize(
    ("code", "log", "words"),
    [
        (1, "error: cannot use /x\n  what to do: look\n", "(exit status 1); started again: cannot use /x"),
        (7, "half way\n", "(exit status 7); started again"),
        (-9, "error: of long ago\n", "(killed by SIGKILL); started again"),
    ],
)
def test_a_death_that_is_made_good_says_why(
    supervisor: Supervisor, launcher: Ranks, tmp_path: Path, code: int, log: str, words: str
) -> None:
    supervisor._policy = RestartPolicy(3)
    supervise.RunLayout(tmp_path / "run").log("trainer-0", 1).write_text(log)
    launcher.running["trainer-0"].code = code
    launcher.running["trainer-1"].code = 1
    deadline_s = time.monotonic() + 5.0
    while not (told := supervisor.look()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert told[0] == f"trainer-0 died {words}"
