"""The drill from top to bottom:

    small form of the recipe ─> one unbroken run ─> for each run of the plan: drive, measure, compare, audit ─> verdict

Nothing in a run is trusted that the drill can check: fates and digests are read from records, promises proven by the audit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from milesbatch.audit.prove import audit_run
from milesbatch.audit.verdict import Verdict
from milesbatch.drill.drive import Driven, Order, drive
from milesbatch.drill.evidence import Outcome, events_of, outcome_of
from milesbatch.drill.measure import Comparison, Recovery, compare, measure
from milesbatch.drill.on_site import for_site
from milesbatch.drill.plan import Act, DrillPlan, DrillRun
from milesbatch.drill.small import small_form
from milesbatch.drill.verdict import DrillVerdict, FaultVerdict
from milesbatch.errors import EXIT_USAGE, InputError, MilesbatchError, RunFailedError
from milesbatch.faults.plan import Fault
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Drill:
    """A drill that is going on."""

    recipe: Recipe
    order: Order
    unbroken: Outcome
    say: Say

    @property
    def is_bitwise(self) -> bool:
        return self.recipe.determinism == "bitwise"


def conduct(
    recipe_path: Path, plan: DrillPlan, sets: tuple[str, ...], directory: Path, say: Say, site: str | None = None
) -> DrillVerdict:
    """Break the recipe's small form in every way of ``plan``; all files go below ``directory``, seen by the nodes.

    Raises:
        InputError: the recipe, or what the plan sets in it, or what it names cannot be used.
        RunFailedError: not even the unbroken run finished.
    """
    began_s = time.monotonic()
    recipe, overrides, changes = small_form(recipe_path, sets)
    for run in plan.runs:
        load_recipe(recipe_path, (*overrides, *run.set))
    say(f"small form of {recipe_path}: {'; '.join(changes)}")
    if site is not None:
        plan, left_out = for_site(plan)
        say(f"on site {site}" + (f"; not possible there: {', '.join(left_out)}" if left_out else ""))
    order = Order(recipe_path, overrides, directory / "unbroken", site, recipe.steps)
    say(f"the unbroken run: {recipe.steps} steps")
    driven = drive(order, None, say)
    if driven.failure is not None:
        kind = InputError if EXIT_USAGE in driven.exits else RunFailedError
        raise kind(
            f"the unbroken run failed: {driven.failure}",
            mend=f"read {order.directory / 'start-1.log'}; the recipe must run before it can be drilled",
        )
    unbroken = outcome_of(driven.layout, recipe.steps)
    drill = Drill(recipe, order, unbroken, say)
    faults: list[FaultVerdict] = []
    for number, run in enumerate(plan.runs, 1):
        say(f"run {number} of {len(plan.runs)}, {run.name}: {', '.join(item.name for item in _items(run))}")
        faults += _break(drill, run, directory / run.name)
    return DrillVerdict(
        recipe=recipe.name,
        changes=changes,
        steps=recipe.steps,
        is_bitwise=drill.is_bitwise,
        weights_digest=unbroken.digests.get(recipe.steps),
        unbroken_problems=(*unbroken.damaged, *_audit(driven)[1]),
        faults=tuple(faults),
        seconds=time.monotonic() - began_s,
    )


def _items(run: DrillRun) -> Iterator[Fault | Act]:
    yield from run.faults
    yield from run.acts


def _break(drill: Drill, run: DrillRun, directory: Path) -> list[FaultVerdict]:
    driven = drive(replace(drill.order, directory=directory), run, drill.say)
    on_site = drill.order.site is not None
    verdicts = judge(driven, run, drill.unbroken, drill.recipe.steps, drill.is_bitwise, on_site)
    for verdict in verdicts:
        drill.say(f"    {verdict.fault}: {verdict.word}{''.join(f'; {problem}' for problem in verdict.problems)}")
    return verdicts


def judge(
    driven: Driven, run: DrillRun, unbroken: Outcome, steps: int, is_bitwise: bool, on_site: bool = False
) -> list[FaultVerdict]:
    """One verdict for each fault and act of a run that was driven to its end."""
    proven, problems = _audit(driven)
    comparison = compare(outcome_of(driven.layout, steps), unbroken, is_bitwise)
    whole = (*((driven.failure,) if driven.failure else ()), *problems, *comparison.differences)
    events = events_of(driven.layout, by_wall_clock=on_site)
    verdicts = []
    for item in _items(run):
        action = item.action if isinstance(item, Fault) else item.act
        fired = driven.fired.get(item.name)
        recovery = measure(fired, action, item.role, events) if fired is not None else Recovery(None, None, 0)
        if item.name in driven.detected_s:
            recovery = replace(recovery, detected_s=round(driven.detected_s[item.name], 2))
        own = (driven.problems[item.name],) if item.name in driven.problems else ()
        if fired is None and not own:
            own = ("did not fire",)
        verdicts.append(_verdict(item, run, fired is not None, recovery, comparison, proven, driven, (*own, *whole)))
    return verdicts


def _verdict(
    item: Fault | Act,
    run: DrillRun,
    has_fired: bool,
    recovery: Recovery,
    comparison: Comparison,
    proven: Verdict | None,
    driven: Driven,
    problems: tuple[str, ...],
) -> FaultVerdict:
    return FaultVerdict(
        fault=item.name,
        run=run.name,
        what=in_words(item),
        fired=has_fired,
        detected_s=recovery.detected_s,
        resumed_s=recovery.resumed_s,
        steps_replayed=recovery.steps_replayed,
        groups_lost=max(comparison.groups_lost, proven.groups.lost if proven else 0),
        groups_repeated=max(comparison.groups_repeated, proven.groups.repeated if proven else 0),
        groups_generated_again=proven.generated_again if proven else 0,
        digest_equal=comparison.digest_equal,
        audit_ok=proven.ok if proven else False,
        starts=len(driven.exits),
        problems=problems,
    )


def _audit(driven: Driven) -> tuple[Verdict | None, tuple[str, ...]]:
    try:
        verdict = audit_run(driven.layout)
    except MilesbatchError as error:
        return None, (f"the audit failed: {error.what}",)
    found = [f"audit: {v.kind}: {v.path}: {v.detail}" for v in verdict.violations]
    return verdict, tuple(found[:3]) + ((f"audit: {len(found) - 3} more violations",) if len(found) > 3 else ())


_ACTS = {
    "power_cut": "every process killed at once",
    "kill_controller": "controller killed",
    "preempt": "SIGTERM to the controller",
    "second_controller": "a second controller started",
    "flip": "bit flipped in the newest {artefact} file",
    "truncate": "the newest {artefact} file cut in half",
    "zombie": "{role} outlives its incarnation and goes on at {point}",
}


def in_words(item: Fault | Act) -> str:
    """What happens, for people."""
    if isinstance(item, Act):
        return _ACTS[item.act].format(artefact=item.artefact, role=item.role, point=item.point)
    words = {"stop": "hung", "kill": "killed", "enospc": "no space", "eio": "I/O error"}.get(item.action, item.action)
    return f"{item.role}: {words} at {item.point}"
