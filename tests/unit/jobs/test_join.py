"""Workers in a job of their own: finding the controller, keeping workers alive, and leaving."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from builders import grow, make_recipe, make_run, past_incarnation

from milesbatch.cluster.context import RoleContext
from milesbatch.cluster.port import RunningProcess
from milesbatch.controller.stopping import StopCause, StopRequest
from milesbatch.errors import EXIT_NO_RESTART, EXIT_TEMPFAIL, EXIT_USAGE, RunFailedError
from milesbatch.jobs import join
from milesbatch.jobs.join import Guests, Host, JoinLoop, find_host
from milesbatch.jobs.order import Order, place_order
from milesbatch.recipe.site import Site
from milesbatch.store.durable import replace_hint, write_secret
from milesbatch.store.layout import RunLayout
from milesbatch.store.liveness import LivenessHint

HOST = Host(3, "http://10.0.0.1:4", "secret", 1)


@dataclass
class Process:
    """A process that ends when told to."""

    code: int | None = None
    killed: bool = False
    pid: int = 1

    def exit_code(self) -> int | None:
        return self.code

    def kill(self) -> bool:
        self.killed = True
        return True

    def terminate(self) -> None: ...


@dataclass
class Launcher:
    """Remembers what it started."""

    address: str = "127.0.0.1"
    started: list[RoleContext] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    code: int | None = None

    def has(self, role: str) -> bool:
        return True

    def node_of(self, context: RoleContext) -> str:
        return ""

    def is_lost(self, context: RoleContext) -> bool:
        return False

    def start(self, context: RoleContext, threads: int) -> RunningProcess:
        self.started.append(context)
        self.processes.append(Process(self.code))
        return self.processes[-1]


class Never:
    """A deadline that never comes."""

    stop: StopRequest | None = None

    def look_for_stop(self) -> StopRequest | None:
        return self.stop


def order(layout: RunLayout, restarts: int = 2) -> Order:
    recipe = make_recipe(rollout={"workers": 2}, slurm={"max_restarts_without_progress": restarts, "heartbeat_s": 0.05})
    return place_order(layout, recipe, Site(name="here"), Path("/home/me"))


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


# -- the controller ---------------------------------------------------------------------------------------------------


def test_a_controller_is_found_by_its_hint_and_its_secret(layout: RunLayout) -> None:
    assert find_host(layout) is None, "nobody has begun"
    number = past_incarnation(layout)
    assert find_host(layout) is None, "no hint, no secret"
    hint = LivenessHint(layout, number, "http://10.0.0.1:4")
    hint.beat()
    assert find_host(layout) is None, "no secret"
    write_secret(layout.token(number), b"secret")
    found = find_host(layout)
    assert found == Host(number, "http://10.0.0.1:4", "secret", 1)
    hint.beat()
    again = find_host(layout)
    assert again is not None and again.count == 2


def test_a_torn_hint_is_nobody_yet(layout: RunLayout) -> None:
    number = past_incarnation(layout)
    write_secret(layout.token(number), b"secret")
    replace_hint(layout.liveness(number), json.dumps({"address": "x", "count": 1}).encode()[:9])
    assert find_host(layout) is None


# -- workers ----------------------------------------------------------------------------------------------------------


def test_workers_of_two_jobs_never_share_a_name(layout: RunLayout) -> None:
    names: list[str] = []
    for job_id in ("7", "8"):
        launcher = Launcher()
        Guests(launcher, order(layout), job_id, HOST, 2)
        names += [context.name for context in launcher.started]
        first = launcher.started[0]
        assert (first.role, first.incarnation, first.attempt, first.token) == ("rollout", 3, 1, "secret")
        assert first.controller_url == HOST.url
    assert names == ["rollout-7000", "rollout-7001", "rollout-8000", "rollout-8001"]


def test_a_worker_that_dies_is_started_again_under_its_name(layout: RunLayout) -> None:
    launcher = Launcher()
    guests = Guests(launcher, order(layout), "7", HOST, 2)
    guests.look()
    launcher.processes[1].code = -9
    guests.look()
    assert [(context.name, context.attempt) for context in launcher.started[2:]] == [("rollout-7001", 2)]
    assert not guests.is_alone


@pytest.mark.parametrize("code", [0, EXIT_TEMPFAIL])
def test_a_worker_that_its_controller_sent_away_is_not_started_again(layout: RunLayout, code: int) -> None:
    launcher = Launcher(code=code)
    guests = Guests(launcher, order(layout), "7", HOST, 2)
    guests.look()
    assert len(launcher.started) == 2 and guests.is_alone


@pytest.mark.parametrize("code", [EXIT_USAGE, EXIT_NO_RESTART])
def test_a_worker_that_cannot_be_mended_ends_the_job(layout: RunLayout, code: int) -> None:
    guests = Guests(Launcher(code=code), order(layout), "7", HOST, 1)
    with pytest.raises(RunFailedError, match=f"rollout-7000 cannot be kept running .exit status {code}"):
        guests.look()


def test_a_worker_that_dies_at_every_start_ends_the_job_after_its_tries(layout: RunLayout) -> None:
    launcher = Launcher(code=-11)
    guests = Guests(launcher, order(layout, restarts=2), "7", HOST, 1)
    guests.look()
    guests.look()
    with pytest.raises(RunFailedError):
        guests.look()
    assert [context.attempt for context in launcher.started] == [1, 2, 3]


def test_leaving_ends_every_worker(layout: RunLayout) -> None:
    launcher = Launcher()
    Guests(launcher, order(layout), "7", HOST, 2).end()
    assert [process.killed for process in launcher.processes] == [True, True]


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_needs_no_workers(layout: RunLayout) -> None:
    assert past_incarnation(layout) == 1
    grow(layout, 8)
    launcher = Launcher()
    assert JoinLoop(order(layout), launcher, "7", Never()).run() == 0
    assert launcher.started == []


def test_when_nobody_comes_the_nodes_are_given_back(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_ALONE_S", 0.1)
    assert JoinLoop(order(layout), Launcher(), "7", Never()).run() == 0


@pytest.mark.parametrize("why", ["signal", "deadline"])
def test_a_job_that_slurm_ends_is_to_be_continued(layout: RunLayout, why: str) -> None:
    deadline = Never()
    loop = JoinLoop(order(layout), Launcher(), "7", deadline)
    if why == "signal":
        loop.was_signalled = True
    else:
        deadline.stop = StopRequest(StopCause.TIME_LIMIT, "soon")
    assert loop.run() == EXIT_TEMPFAIL


def test_a_hint_that_does_not_grow_is_no_controller(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last incarnation's hint and secret stay behind when its controller dies."""
    monkeypatch.setattr(join, "_ALONE_S", 0.5)
    number = past_incarnation(layout)
    LivenessHint(layout, number, "http://10.0.0.1:4").beat()
    write_secret(layout.token(number), b"secret")
    launcher = Launcher()
    assert JoinLoop(order(layout), launcher, "7", Never()).run() == 0
    assert launcher.started == []


def test_the_same_controller_is_joined_again_after_a_pause_of_its_signs_of_life(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk keeps its hint from growing for a while; who left then must come back."""
    monkeypatch.setattr(join, "_JOIN_AGAIN_S", 0.3)
    number = past_incarnation(layout)
    write_secret(layout.token(number), b"secret")
    hint = LivenessHint(layout, number, "http://10.0.0.1:4")
    launcher, deadline = Launcher(), Never()
    loop = JoinLoop(order(layout), launcher, "7", deadline)
    loop._silent_s = 0.5

    def live() -> None:
        for pause_s in (*[0.1] * 10, 2.0, *[0.1] * 20):
            hint.beat()
            time.sleep(pause_s)
        loop.was_signalled = True

    beating = threading.Thread(target=live)
    beating.start()
    assert loop.run() == EXIT_TEMPFAIL
    beating.join()
    assert [context.name for context in launcher.started[:4]] == ["rollout-7000", "rollout-7001"] * 2
    assert [context.attempt for context in launcher.started[:4]] == [1, 1, 1001, 1001]
