"""From a recipe and a directory to a run in this controller's hands: make it or check it, take it over, hand it to the loop.

Owns: the order in which that happens, the same for every launcher. Never: signals or processes. Invariant: nothing in
an existing run is touched before recipe, data and reward were found to be those that it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from milesbatch.cluster.context import fault_plan_path
from milesbatch.cluster.orphans import end_orphans
from milesbatch.cluster.port import Launcher
from milesbatch.controller.display import open_display
from milesbatch.controller.loop import ControllerLoop
from milesbatch.controller.stopping import Ending, StopWatch
from milesbatch.decisions.origin import origin_after
from milesbatch.environments.held_out import check_held_out, open_held_out
from milesbatch.environments.judge import reward_fingerprint
from milesbatch.environments.prompts import open_prompts
from milesbatch.errors import RunMismatchError
from milesbatch.faults.injector import arm_from
from milesbatch.faults.points import point
from milesbatch.preparation import prepare
from milesbatch.recipe.forking import refuse_fork
from milesbatch.recipe.freeze import ABSENT, changed_keys
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.records import ForkRecord, IncarnationRecord, RunRecord
from milesbatch.store.beginning import read_beginning
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.layout import RunLayout
from milesbatch.store.places import refuse_undecodable
from milesbatch.store.run import frozen_recipe, read_run_record
from milesbatch.store.sight import sight_of
from milesbatch.store.survey import read_incarnations
from milesbatch.store.takeover import Claimant, Incarnation, take_over
from milesbatch.store.unfinished import take_up_unfinished

Say = Callable[[str], None]
HolderIsGone = Callable[[IncarnationRecord], bool]
WatchesOf = Callable[[ControllerLoop], Sequence[StopWatch]]


def open_or_make(layout: RunLayout, wanted: Recipe, say: Say, preparing: Sequence[str] = ()) -> dict[str, Any]:
    """Make the run, or check that it is one of this recipe; returns the allowed changes to its frozen recipe.

    ``preparing`` is the command that runs Python where the model can be loaded; empty: this interpreter.

    Raises:
        RunMismatchError: the directory is a run of something else; nothing in it was touched.
        InputError: something that the recipe names cannot be used.
    """
    refuse_undecodable(layout.root, "--run-dir")
    if layout.root.exists() and not layout.root.is_dir():
        raise RunMismatchError(f"{layout.root} is a file", mend="give a directory with --run-dir")
    sight = sight_of(layout.root, wanted.slurm.visible_wait_s, say)
    record = sight.until_seen(lambda: read_run_record(layout) or _make_run(layout, wanted, say, preparing))
    changes = sight.until_seen(lambda: check_same_recipe(layout, record, wanted))
    sight.until_seen(lambda: read_incarnations(layout))  # whoever asks for them next sees what this host has seen
    _check_fingerprints(record, wanted)
    if any(path.partition(".")[0] == "evaluation" for path in changes):
        _check_evaluation(wanted)
    return changes


def control(
    layout: RunLayout,
    recipe: Recipe,
    recipe_changes: dict[str, Any],
    launcher: Launcher,
    claimant: Claimant,
    say: Say,
    watches_of: WatchesOf = lambda loop: (),
    holder_is_gone: HolderIsGone = lambda record: False,
) -> Ending:
    """Take the run over and run it to its end, or until it is stopped.

    Raises:
        RunHeldError: another controller is alive.
        MilesbatchError: the run failed; all processes are gone.
    """
    arm_from(fault_plan_path(), "controller-0", layout)  # first: a bad plan must not cost an incarnation
    sight = sight_of(layout.root, recipe.slurm.visible_wait_s, say)
    incarnation = take_over(layout, claimant, recipe_changes, holder_is_gone, sight)
    if recipe.determinism == "relaxed":
        incarnation = take_up_unfinished(layout, incarnation, sight)
    say(f"incarnation {incarnation.number} of {layout.root}: {_found(incarnation)}")
    point("controller.taken_over")
    if orphans := end_orphans(layout.root, incarnation.number):
        say(f"ended processes that an earlier incarnation left behind: {', '.join(map(str, orphans))}")
    return asyncio.run(_loop(layout, recipe, incarnation, launcher, watches_of))


async def _loop(
    layout: RunLayout, recipe: Recipe, incarnation: Incarnation, launcher: Launcher, watches_of: WatchesOf
) -> Ending:
    display = open_display(recipe.name, recipe.steps)
    try:
        loop = ControllerLoop(layout, recipe, incarnation, launcher, display)
        loop.watch(watches_of(loop))
        return await loop.run()
    finally:
        display.close()


def check_same_recipe(layout: RunLayout, record: RunRecord, wanted: Recipe) -> dict[str, Any]:
    """What differs from the frozen recipe and may: dotted path -> value.

    Raises:
        RunMismatchError: something differs that may not; nothing in the run was touched.
    """
    changes = changed_keys(frozen_recipe(layout, record), wanted)
    refused = [change for change in changes if not change.may_change]
    if refused:
        listing = "\n".join(f"    {change}" for change in refused)
        raise RunMismatchError(
            f"{layout.root} is a run of another recipe (run {record.run_id}); these keys differ:\n{listing}",
            mend="give the recipe that the run was started with; or go on with this one in a run of its own, from the newest"
            " checkpoint of this one, with --fork NEW_RUN; or begin anew in another directory with --run-dir",
        )
    # Fields of a kind that was changed go with it: naming them would give them to the new kind.
    kinds = {change.path.rpartition(".")[0] for change in changes if change.path.endswith(".kind")}
    kept = [change for change in changes if change.new is not ABSENT or change.path.rpartition(".")[0] not in kinds]
    return {change.path: None if change.new is ABSENT else change.new for change in kept}


def check_beginning(layout: RunLayout, recipe: Recipe) -> ForkRecord | None:
    """What a directory without a run was given by a fork, perhaps for another recipe; None when it was given nothing.

    Raises:
        RunMismatchError: ``recipe`` cannot go on from there. CorruptArtefactError: what was given is damaged.
    """
    fork = read_beginning(layout)
    if fork is not None:
        origin = origin_after(fork.forked_from)
        refuse_fork(
            load_recipe(layout.parent_recipe),
            recipe,
            step=origin.step,
            first_group=origin.first_group,
            has_gaps=bool(origin.decided),
        )
    return fork


def _make_run(layout: RunLayout, recipe: Recipe, say: Say, preparing: Sequence[str]) -> RunRecord:
    fork = check_beginning(layout, recipe)
    lay_out(layout, recipe)
    say(f"new run in {layout.root}" if fork is None else f"new run in {layout.root}, a fork of {fork.forked_from.path}")
    fingerprints = prepare(layout, say, preparing)
    return commit_run(layout, recipe, fingerprints)


def _check_fingerprints(record: RunRecord, wanted: Recipe) -> None:
    found = {
        "data": open_prompts(wanted).fingerprint(),
        "reward": reward_fingerprint(wanted.environment.reward),
    }
    for name, digest in found.items():
        if record.fingerprints[name] != digest:
            raise RunMismatchError(
                f"the {name} of run {record.run_id} has changed since the run began:"
                f" it was {record.fingerprints[name]}, it is {digest}",
                mend="put back what the run was started with; or go on in a run of its own with --fork NEW_RUN",
            )


def _check_evaluation(wanted: Recipe) -> None:
    if wanted.evaluation is not None:
        check_held_out(open_held_out(wanted.evaluation.prompts, wanted.evaluation.num_prompts, wanted.seed), wanted)


def _found(incarnation: Incarnation) -> str:
    found, saved = incarnation.found, len(incarnation.unfinished)
    unfinished = f", {saved} files of unfinished episodes" if saved else ""
    if not found.batches:
        begin = found.origin.step
        return f"starts from {f'step {begin} of its parent' if begin else 'the beginning'}{unfinished}"
    steps, checkpoint = found.last_batch, max(found.checkpoints, default=0)
    unused = f"{len(found.ready_files)} unused trajectory files"
    return f"{steps} steps recorded, last checkpoint {checkpoint}, {unused}{unfinished}"
