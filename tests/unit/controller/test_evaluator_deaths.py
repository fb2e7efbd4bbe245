"""An evaluator that dies: started again so often, then off; never the end of the run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from builders import make_layout, make_recipe
from ended_by_hand import EndedByHand

from milesbatch.cluster.context import RoleContext
from milesbatch.controller.hub import Hub
from milesbatch.controller.supervise import Supervisor
from milesbatch.errors import EXIT_USAGE
from milesbatch.store.events import EventLog, read_events
from milesbatch.store.layout import RunLayout

EVALUATION = {"prompts": {"kind": "arithmetic", "min_operand": 100, "max_operand": 200}, "num_prompts": 4}


class Place:
    """Starts processes, and has a place for ``roles``."""

    address = "127.0.0.1"

    def __init__(self, *roles: str) -> None:
        self.roles = roles
        self.running: dict[str, EndedByHand] = {}
        self.starts: list[str] = []

    def has(self, role: str) -> bool:
        return role in self.roles

    def node_of(self, context: RoleContext) -> str:
        return ""

    def is_lost(self, context: RoleContext) -> bool:
        return False

    def start(self, context: RoleContext, threads: int) -> EndedByHand:
        self.running[context.name] = EndedByHand()
        self.starts.append(context.name)
        return self.running[context.name]


def supervise(tmp_path: Path, place: Place, **changes: Any) -> Supervisor:
    layout = make_layout(tmp_path / "run")
    recipe = make_recipe(
        **{
            "slurm": {"max_restarts_without_progress": 2},
            "tracking": {"kind": "none"},
            "evaluation": EVALUATION,
            **changes,
        }
    )
    base = RoleContext(layout.root, "trainer", 0, 1, 1, 1, "http://127.0.0.1:1", "token", 1, 1.0)
    made = Supervisor(layout, recipe, Hub(recipe), place, base, EventLog(layout, "controller-0", 1))
    made.start_all()
    return made


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return [event for event, _ in read_events(RunLayout(tmp_path / "run").event_log("controller-0", 1))]


def test_it_is_started_again_and_then_off_while_the_run_goes_on(tmp_path: Path) -> None:
    place = Place("trainer", "rollout", "evaluation")
    supervisor = supervise(tmp_path, place)
    for step, word in enumerate(("started again", "started again", "evaluation is off"), start=1):
        supervisor._hub.last_step = step  # steps of the trainer are no progress of the evaluator
        place.running["evaluation-0"].code = -signal.SIGSEGV
        (said,) = supervisor.look()
        assert word in said
    assert place.starts.count("evaluation-0") == 3 and supervisor.running("evaluation") == []
    assert supervisor.running("trainer") and supervisor.running("rollout")
    assert supervisor.look() == []
    (off,) = [event for event in events(tmp_path) if event["event"] == "evaluation_off"]
    assert "SIGSEGV" in off["reason"]


def test_wrong_prompts_turn_it_off_at_once_and_the_words_are_kept(tmp_path: Path) -> None:
    place = Place("trainer", "rollout", "evaluation")
    supervisor = supervise(tmp_path, place)
    RunLayout(tmp_path / "run").log("evaluation-0", 1).write_text(
        "error: 3 of 4 evaluation prompts are asked in training too\n"
    )
    place.running["evaluation-0"].code = EXIT_USAGE
    (said,) = supervisor.look()
    assert said.startswith("evaluation is off") and "asked in training too" in said
    assert place.starts.count("evaluation-0") == 1


def test_done_it_just_ends_and_a_stop_starts_it_no_more(tmp_path: Path) -> None:
    place = Place("trainer", "rollout", "evaluation")
    supervisor = supervise(tmp_path, place)
    place.running["evaluation-0"].code = 0
    assert supervisor.look() == ["evaluation-0 ended"]
    assert place.starts.count("evaluation-0") == 1
    other = Place("trainer", "rollout", "evaluation")
    supervisor = supervise(tmp_path / "other", other)
    supervisor._hub.stop()
    other.running["evaluation-0"].code = -signal.SIGKILL
    assert supervisor.look() == ["evaluation-0 ended while stopping (killed by SIGKILL)"]
    assert other.starts.count("evaluation-0") == 1


def test_it_is_ended_with_the_others(tmp_path: Path) -> None:
    place = Place("trainer", "rollout", "evaluation")
    supervisor = supervise(tmp_path, place)
    supervisor.kill_working()
    assert supervisor.running() == []


def test_where_there_is_no_place_for_it_it_is_said_how_it_is_done(tmp_path: Path) -> None:
    place = Place("trainer", "rollout")
    (said,) = supervise(tmp_path, place).look()
    assert "milesbatch evaluate" in said and "--follow" in said
    assert "evaluation-0" not in place.starts


def test_without_the_section_there_is_none(tmp_path: Path) -> None:
    place = Place("trainer", "rollout", "evaluation")
    supervisor = supervise(tmp_path, place, evaluation=None)
    assert supervisor.look() == [] and "evaluation-0" not in place.starts


@pytest.mark.parametrize(("device", "starts"), [("cuda", 0), ("cpu", 1)])
def test_with_servers_on_gpus_the_run_starts_none_for_training_has_them_all(
    tmp_path: Path, device: str, starts: int
) -> None:
    place = Place("trainer", "rollout", "evaluation")
    rollout = {"engine": "sglang", "sglang": {"device": device}}
    supervisor = supervise(tmp_path, place, rollout=rollout, determinism="relaxed")
    assert place.starts.count("evaluation-0") == starts
    said = supervisor.look()
    assert any("--follow` on a GPU of its own" in text for text in said) == (starts == 0), said
