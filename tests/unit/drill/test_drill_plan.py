"""Drill plans: the standard one covers the fault table, a fault plan is one too, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from milesbatch.drill.plan import STANDARD, Act, DrillPlan, DrillRun, load_drill_plan
from milesbatch.drill.small import SMALL_FORM, STEPS, small_form
from milesbatch.errors import InputError, RecipeError

RECIPES = Path(__file__).parents[3] / "recipes"


def load(tmp_path: Path, document: Any) -> DrillPlan:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_drill_plan(path)


def test_the_standard_plan_covers_the_fault_table() -> None:
    plan = load_drill_plan(STANDARD)
    faults = [fault for run in plan.runs for fault in run.faults]
    acts = [act for run in plan.runs for act in run.acts]
    killed = {(fault.role, fault.point) for fault in faults if fault.action == "kill"}
    moments = ("recorded", "trained", "published", "checkpoint_started", "checkpoint_written")
    for rank in ("trainer-0", "trainer-1"):
        assert {(rank, f"trainer.{moment}") for moment in moments} <= killed
    assert ("trainer-0", "trainer.checkpoint_committed") in killed
    assert {"rollout.leased", "rollout.generated", "rollout.written"} <= {point for _, point in killed}
    assert {fault.role[:7] for fault in faults if fault.action == "stop"} == {"trainer", "rollout"}
    for action in ("enospc", "eio"):
        places = {fault.point.partition(":")[2] for fault in faults if fault.action == action}
        assert places == {"trajectories", "batches", "weights", "checkpoints"}
    assert "partition" in {fault.action for fault in faults}
    assert {act.act for act in acts} == set(Act.model_fields["act"].annotation.__args__)  # type: ignore[union-attr]
    for action in ("flip", "truncate"):
        damaged = {act.artefact for act in acts if act.act == action}
        assert damaged == {"weights", "checkpoint", "trajectory"}


def test_acts_at_one_point_share_one_hold() -> None:
    run = DrillRun(
        name="r",
        acts=(
            Act(name="a", act="flip", artefact="weights", nth=5),
            Act(name="b", act="flip", artefact="checkpoint", nth=5),
            Act(name="c", act="power_cut", nth=6),
        ),
    )
    assert [[act.name for act in step] for step in run.steps()] == [["a", "b"], ["c"]]
    (hold,) = run.fault_plan(run.steps()).faults
    assert (hold.name, hold.action, hold.nth) == ("hold-a", "delay", 5)


def test_triggers_wait_for_the_act_before() -> None:
    """In one start only acts up to the first that ends it; a process held before its turn would be lost."""
    second = Act(name="a", act="second_controller", nth=1)
    run = DrillRun(name="r", acts=(second, Act(name="b", act="preempt", nth=2), Act(name="c", act="power_cut", nth=3)))
    steps = run.steps()
    assert [fault.name for fault in run.fault_plan(steps).faults] == ["hold-a", "hold-b"]
    assert [fault.name for fault in run.fault_plan(steps[2:]).faults] == ["hold-c"]
    assert run.fault_plan([]).faults == ()


def test_a_zombie_outlives_its_controller() -> None:
    run = DrillRun(name="r", acts=(Act(name="z", act="zombie", role="rollout-1", point="link:trajectories"),))
    (fault,) = run.fault_plan(run.steps()).faults
    assert (fault.action, fault.role, fault.point) == ("outlive", "rollout-1", "link:trajectories")
    (held,) = run.fault_plan([], ["z"]).faults
    assert (held.action, held.role, held.point) == ("delay", "controller", "unlink:incarnations")


def test_each_fault_of_a_fault_plan_gets_a_run(tmp_path: Path) -> None:
    faults = [
        {"name": name, "role": "trainer-0", "point": "trainer.recorded", "nth": 2, "action": "kill"} for name in "ab"
    ]
    plan = load(tmp_path, {"faults": faults})
    assert [(run.name, [fault.name for fault in run.faults], run.faults[0].nth) for run in plan.runs] == [
        ("a", ["a"], 2),
        ("b", ["b"], 2),
    ]


ACT = {"name": "a", "act": "power_cut"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"runs": []}, ["runs"]),
        ({"runs": [{"name": "r"}]}, ["runs[0]", "neither faults nor acts"]),
        ({"runs": [{"name": "r", "acts": [{"name": "a", "act": "pray"}]}]}, ["runs[0].acts[0].act", "pray"]),
        ({"runs": [{"name": "r", "acts": [{"name": "a", "act": "flip"}]}]}, ["runs[0].acts[0]", "artefact"]),
        ({"runs": [{"name": "r", "acts": [{**ACT, "artefact": "weights"}]}]}, ["runs[0].acts[0]", "artefact"]),
        ({"runs": [{"name": "r", "acts": [{**ACT, "point": "trainer.nowhere"}]}]}, ["trainer.nowhere"]),
        ({"runs": [{"name": "r", "acts": [{**ACT, "hold_s": 0}]}]}, ["hold_s"]),
        ({"runs": [{"name": "r", "acts": [ACT, ACT]}]}, ["twice", "a"]),
        ({"runs": [{"name": "r", "acts": [ACT]}, {"name": "r", "acts": [{**ACT, "name": "b"}]}]}, ["run names", "r"]),
        ({"faults": []}, ["runs"]),
        ({"faults": [{"name": "a"}]}, ["faults[0].role"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, document: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, document)
    for word in ("plan.yaml", *words):
        assert word in str(caught.value)


def test_the_small_form_keeps_the_topology() -> None:
    small, overrides, changes = small_form(RECIPES / "tiny.yaml", ())
    assert (small.steps, small.checkpoint.every, small.tracking.kind) == (STEPS, 3, "none")
    assert (small.trainer.ranks, small.rollout.workers, small.trainer.groups_per_step) == (2, 2, 16)
    assert overrides == SMALL_FORM
    assert "steps: 80 -> 8" in changes
    assert any(change.startswith("tracking.kind: 'mlflow' -> 'none'") for change in changes)


def test_what_the_user_sets_wins() -> None:
    small, _, changes = small_form(RECIPES / "tiny.yaml", ("steps=12", "rollout.workers=1"))
    assert (small.steps, small.rollout.workers) == (12, 1)
    assert not any(change.startswith(("steps", "rollout")) for change in changes)


def test_a_recipe_that_is_wrong_is_refused() -> None:
    with pytest.raises(RecipeError, match="ranks"):
        small_form(RECIPES / "tiny.yaml", ("trainer.rank=3",))
