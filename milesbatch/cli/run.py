"""``milesbatch run``: the whole loop on this machine; the same command again continues the run.

load the recipe -> make or open the run directory, take it over (milesbatch.controller.opening) -> controller loop
(milesbatch.controller.loop)
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from milesbatch.cli.forking import ForkOption, ForkStepOption, begin_fork, place_of
from milesbatch.cli.recipes import find_recipe
from milesbatch.cluster.context import runs_directory
from milesbatch.errors import EXIT_TEMPFAIL
from milesbatch.recipe.load import load_recipe
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_origin


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML), or the name of a shipped one.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run directory; default: $MILESBATCH_RUNS/NAME, or ./runs/NAME.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Set a recipe field; may be repeated.")
    ] = None,
    fork: ForkOption = None,
    fork_step: ForkStepOption = None,
) -> None:
    """Run a recipe on this machine, or continue the run that was stopped or killed.

    With --fork NEW_RUN it goes on in another directory, with other settings:
    milesbatch run RECIPE --run-dir OLD --fork NEW --set trainer.optimizer.learning_rate=1e-6

    Exit code 0 when the run is finished, 75 when it was stopped in order to be continued, 1 when it failed, 2 when the
    recipe or other input is wrong.
    """
    from milesbatch.cluster.local import LocalLauncher
    from milesbatch.controller.opening import control, open_or_make
    from milesbatch.engines.sglang.key import check_key
    from milesbatch.report.status import cause_of_restart, is_finished
    from milesbatch.store.takeover import Claimant

    wanted = load_recipe(recipe if recipe.exists() else find_recipe(str(recipe)), changes or [])
    place = place_of(run_dir, runs_directory(), wanted.name)
    layout = RunLayout(begin_fork(place, run_dir is not None, fork, fork_step, wanted, _say))
    if wanted.rollout.sglang.key_file and not (layout.run_record.is_file() and is_finished(layout, wanted.steps)):
        check_key(wanted, may_be_elsewhere=False)
    recipe_changes = open_or_make(layout, wanted, _say)
    if is_finished(layout, wanted.steps):
        _say(f"{layout.root} is finished: {wanted.steps} steps are trained")
        _say_where_to_look(layout, wanted.steps)
        return
    claimant = Claimant(cause=cause_of_restart(layout))
    ending = control(layout, wanted, recipe_changes, LocalLauncher(), claimant, _say)
    _say_ending(layout, "finished" if ending.is_finished else "stopped")
    _say_where_to_look(layout, wanted.steps if ending.is_finished else None)
    if not ending.is_finished:
        raise typer.Exit(EXIT_TEMPFAIL)


def _say_ending(layout: RunLayout, ending: str) -> None:
    from milesbatch.report.summary import summary_lines

    _say("")
    _say(f"{layout.root}: {ending}")
    for line in summary_lines(layout):
        _say(f"  {line}")


def _say_where_to_look(layout: RunLayout, finished_at: int | None) -> None:
    run, program = _as_argument(layout.root), _program()
    first = read_origin(layout).first_group
    goes_on = (
        "the same command again continues this run where it is"
        if finished_at is None
        else f"for more steps: the same command with --set steps={2 * finished_at}"
    )
    database = layout.tracking / "mlflow.db"  # not there when curves go elsewhere, or nowhere
    show = f"{program.removesuffix('milesbatch')}mlflow ui --backend-store-uri sqlite:///{run}/tracking/mlflow.db"
    curves = f"  {show}\n" if database.exists() else ""
    _say(f"""
where to look next:
  {program} status {run}          state, versions, restarts
  {program} traj stats {run}      reward, length and staleness by step
  {program} traj show {run} {first}     the first prompt group as conversations
  {program} weights ls {run}      policy versions
  {program} audit {run}           prove from the files that nothing was lost or repeated
{curves}{goes_on}""")


def _as_argument(path: Path) -> str:
    """A path as a shell takes it, and no command takes it for an option."""
    return shlex.quote(str(path) if not str(path).startswith("-") else f"./{path}")


def _program() -> str:
    """The command as it was called, so that what is printed can be copied."""
    called = Path(sys.argv[0])
    if called.name != "milesbatch":
        return "milesbatch"
    return str(called.relative_to(Path.cwd())) if called.is_relative_to(Path.cwd()) else str(called)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # as in controller.display
        print(text, file=sys.stderr, flush=True)
