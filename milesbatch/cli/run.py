"""``milesbatch run``: the whole loop on this machine; the same command again continues the run.

load the recipe -> make or open the run directory -> take it over -> controller loop (milesbatch.controller.loop)
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from milesbatch.cli.recipes import find_recipe
from milesbatch.cluster.context import runs_directory
from milesbatch.errors import EXIT_TEMPFAIL, RunMismatchError
from milesbatch.recipe.freeze import ABSENT, changed_keys
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.records import RunRecord
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import frozen_recipe, read_run_record


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), or the name of a shipped one.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run directory; default: $MILESBATCH_RUNS/NAME, or ./runs/NAME.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a recipe field; may be repeated.")
    ] = None,
) -> None:
    """Run a recipe on this machine, or continue the run that was stopped or killed.

    Exit code 0 when the run is finished, 75 when it was stopped in order to be continued, 1 when it failed, 2 when the
    recipe or other input is wrong.
    """
    from milesbatch.controller.loop import Ending
    from milesbatch.report.status import is_finished

    wanted = load_recipe(recipe if recipe.exists() else find_recipe(str(recipe)), changes or [])
    layout = RunLayout(run_dir if run_dir is not None else runs_directory() / wanted.name)
    _refuse_unsafe_directory(layout)
    record = read_run_record(layout) or _make_run(layout, wanted)
    recipe_changes = _allowed_changes(layout, record, wanted)
    _check_fingerprints(record, wanted)
    if is_finished(layout, wanted.steps):
        _say(f"{layout.root} is finished: {wanted.steps} steps are trained")
        _say_where_to_look(layout, wanted.steps)
        return
    ending = _control(layout, wanted, recipe_changes)
    _say_ending(layout, ending.value)
    _say_where_to_look(layout, wanted.steps if ending is Ending.FINISHED else None)
    if ending is not Ending.FINISHED:
        raise typer.Exit(EXIT_TEMPFAIL)


def _control(layout: RunLayout, recipe: Recipe, recipe_changes: dict[str, Any]) -> Any:
    from milesbatch.cluster.context import fault_plan_path
    from milesbatch.cluster.local import LocalLauncher
    from milesbatch.controller.display import open_display
    from milesbatch.controller.loop import ControllerLoop
    from milesbatch.faults.injector import arm_from
    from milesbatch.faults.points import point
    from milesbatch.report.status import cause_of_restart
    from milesbatch.store.takeover import Claimant, take_over

    arm_from(fault_plan_path(), "controller-0", layout)  # first: a bad plan must not cost an incarnation
    incarnation = take_over(layout, Claimant(cause=cause_of_restart(layout)), recipe_changes)
    _say(f"incarnation {incarnation.number} of {layout.root}: {_found(incarnation.found)}")
    point("controller.taken_over")
    display = open_display(recipe.name, recipe.steps)
    try:

        async def control() -> Any:
            return await ControllerLoop(layout, recipe, incarnation, LocalLauncher(), display).run()

        return asyncio.run(control())
    finally:
        display.close()


def _found(found: Any) -> str:
    if not found.batches:
        return "starts from the beginning"
    steps, checkpoint = len(found.batches), max(found.checkpoints, default=0)
    return f"{steps} steps recorded, last checkpoint {checkpoint}, {len(found.ready_files)} unused trajectory files"


def _refuse_unsafe_directory(layout: RunLayout) -> None:
    if layout.root.exists() and not layout.root.is_dir():
        raise RunMismatchError(f"{layout.root} is a file", mend="give a directory with --run-dir")


def _make_run(layout: RunLayout, recipe: Recipe) -> RunRecord:
    from milesbatch.preparation import prepare

    lay_out(layout, recipe)
    _say(f"new run in {layout.root}")
    fingerprints = prepare(layout, _say)
    return commit_run(layout, recipe, fingerprints)


def _allowed_changes(layout: RunLayout, record: RunRecord, wanted: Recipe) -> dict[str, Any]:
    """What differs from the frozen recipe and may.

    Raises:
        RunMismatchError: something differs that may not; nothing in the run was touched.
    """
    changes = changed_keys(frozen_recipe(layout, record), wanted)
    refused = [change for change in changes if not change.may_change]
    if refused:
        listing = "\n".join(f"    {change}" for change in refused)
        raise RunMismatchError(
            f"{layout.root} is a run of another recipe (run {record.run_id}); these keys differ:\n{listing}",
            mend="give the recipe that the run was started with, or another directory with --run-dir",
        )
    return {change.path: None if change.new is ABSENT else change.new for change in changes}


def _check_fingerprints(record: RunRecord, wanted: Recipe) -> None:
    from milesbatch.environments.judge import reward_fingerprint
    from milesbatch.environments.prompts import open_prompts

    found = {
        "data": open_prompts(wanted).fingerprint(),
        "reward": reward_fingerprint(wanted.environment.reward),
    }
    for name, digest in found.items():
        if record.fingerprints[name] != digest:
            raise RunMismatchError(
                f"the {name} of run {record.run_id} has changed since the run began:"
                f" it was {record.fingerprints[name]}, it is {digest}",
                mend="put back what the run was started with, or start a new run with --run-dir",
            )


def _say_ending(layout: RunLayout, ending: str) -> None:
    from milesbatch.report.summary import summary_lines

    _say("")
    _say(f"{layout.root}: {ending}")
    for line in summary_lines(layout):
        _say(f"  {line}")


def _say_where_to_look(layout: RunLayout, finished_at: int | None) -> None:
    run, program = layout.root, _program()
    goes_on = (
        "the same command again continues this run where it is"
        if finished_at is None
        else f"for more steps: the same command with --set steps={2 * finished_at}"
    )
    _say(f"""
where to look next:
  {program} status {run}          state, versions, restarts
  {program} traj stats {run}      reward, length and staleness by step
  {program} traj show {run} 0     the first prompt group as conversations
  {program} weights ls {run}      policy versions
  {program} audit {run}           prove from the files that nothing was lost or repeated
  {program.removesuffix("milesbatch")}mlflow ui --backend-store-uri sqlite:///{run}/tracking/mlflow.db
{goes_on}""")


def _program() -> str:
    """The command as it was called, so that what is printed can be copied."""
    called = Path(sys.argv[0])
    if called.name != "milesbatch":
        return "milesbatch"
    return str(called.relative_to(Path.cwd())) if called.is_relative_to(Path.cwd()) else str(called)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # as in controller.display
        print(text, file=sys.stderr, flush=True)
