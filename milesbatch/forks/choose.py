"""What a fork begins with: which checkpoint of the parent, which policy versions, which place in the stream of prompts.

Owns the choice, by the same survey that a take-over makes; reads only. Invariant: everything chosen counts in the parent
(whole, and within its seals), and is enough to go on from: the optimizer's state behind step k, and each version that may make
groups of the next steps. The page behind it is ``docs/forks.md``.

In bitwise mode the groups of step k + 1 are made by version k - staleness: so the versions from there on are taken, from the
newest full copy at or below it. Where the parent has retired those, the oldest kept one takes their place, and the first steps
are then not those that the parent would have made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from milesbatch.decisions.fates import FateTable
from milesbatch.errors import CorruptArtefactError, InputError, RunMismatchError
from milesbatch.forks.passed_over import newer_than, why_not
from milesbatch.recipe.forking import refuse_fork
from milesbatch.recipe.models import Recipe
from milesbatch.records import (
    CheckpointManifest,
    ForkedFrom,
    IncarnationRecord,
    RunRecord,
    WeightsManifest,
    digest_bytes,
)
from milesbatch.store.beginning import not_started
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.store.places import true_path
from milesbatch.store.run import frozen_recipe, read_run_record
from milesbatch.store.survey import Seals, Survey, read_incarnations, survey
from milesbatch.weights.reader import is_retired, read_manifest

_MOST = 12
"""How many steps a message lists."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A state of ``parent`` that a run can begin with."""

    parent: RunLayout
    record: RunRecord
    forked_from: ForkedFrom
    checkpoint: CheckpointManifest | None
    """None when it is the starting model."""
    weights: tuple[WeightsManifest, ...]
    """Ascending and without a gap, from one with a full copy to that of the step; empty for the starting model."""
    is_exact: bool
    """Are the versions there that the parent itself would have made the next groups with?"""
    passed_over: tuple[tuple[int, str], ...] = ()
    """Newer checkpoints that cannot be used, newest first: step and reason; empty when a step was asked for."""


def parent_record(parent: RunLayout) -> RunRecord:
    """The record of the run to be forked.

    Raises:
        InputError: there is no run there. CorruptArtefactError: its record is damaged.
    """
    record = read_run_record(parent)
    if record is None and (told := not_started(parent, was_submitted=False)) is not None:
        raise told
    if record is None:
        raise InputError(f"{parent.root} is not a run: it has no run.json", mend="give the run to fork with --run-dir")
    return record


def choose(parent: RunLayout, wanted: Recipe, step: int | None) -> Choice:
    """Choose the state behind ``step``, or behind the newest checkpoint that can be used.

    Raises:
        InputError: there is no run there, or no usable checkpoint of that step; lists those that are.
        RunMismatchError: ``wanted`` cannot go on from that state.
        CorruptArtefactError: a record that the choice depends on is damaged.
    """
    record = parent_record(parent)
    incarnations = read_incarnations(parent)
    found = survey(parent, incarnations)
    chosen = _step(parent, incarnations, found, step)
    passed = newer_than(parent, incarnations, found, chosen) if step is None else ()
    if passed and not chosen:
        raise CorruptArtefactError(
            f"{parent.root} has no checkpoint that can be used: {passed[0][1]}",
            mend=f"run `milesbatch audit {parent.root}`; or begin with its starting model: --fork-step 0",
        )
    fates = FateTable.of(found.batches[: chosen - found.origin.step], found.origin)
    position = range(found.origin.first_group, fates.stream_position)
    pending = [group for group in position if fates.is_pending(group)]
    first = pending[0] if pending else fates.stream_position
    decided = tuple(group for group in position if group > first and not fates.is_pending(group))
    refuse_fork(frozen_recipe(parent, record), wanted, step=chosen, first_group=first, has_gaps=bool(decided))
    checkpoint, checkpoint_digest = _checkpoint(parent, chosen)
    wish = (
        max(found.origin.first_version, chosen - wanted.rollout.staleness)
        if wanted.determinism == "bitwise"
        else chosen
    )
    weights = _weights(parent, incarnations, found.origin.first_version, wish, chosen) if chosen else ()
    start = read_manifest(parent, chosen)
    return Choice(
        parent=parent,
        record=record,
        forked_from=ForkedFrom(
            run_id=record.run_id,
            path=os.fsencode(true_path(parent.root)).decode(errors="backslashreplace"),
            step=chosen,
            policy_version=chosen,
            weights_digest=None if start is None else start.weights_digest,
            checkpoint_digest=checkpoint_digest,
            first_version=weights[0].version if weights else 0,
            first_group=first,
            decided=decided,
        ),
        checkpoint=checkpoint,
        weights=weights,
        is_exact=not weights or weights[0].version <= wish,
        passed_over=passed,
    )


def _step(parent: RunLayout, incarnations: Sequence[IncarnationRecord], found: Survey, step: int | None) -> int:
    usable = [checkpoint for checkpoint in found.checkpoints if checkpoint <= min(found.last_batch, found.last_version)]
    usable = usable if found.origin.step else [0, *usable]
    if not usable:
        raise CorruptArtefactError(
            f"{parent.root} has no checkpoint that counts, and it is a fork itself: there is nothing to begin with",
            mend=f"run `milesbatch audit {parent.root}`",
        )
    if step is None:
        return max(usable)
    if step not in usable:
        raise InputError(
            f"{parent.root} has no checkpoint of step {step} that can be used:"
            f" {why_not(parent, incarnations, found, step)}",
            mend=f"give one of {_few(usable)} with --fork-step{' (0: the starting model)' if 0 in usable else ''}",
        )
    return step


def _few(steps: Sequence[int]) -> str:
    """The newest ones; a run that keeps every checkpoint has many."""
    return ("" if len(steps) <= _MOST else "..., ") + ", ".join(map(str, steps[-_MOST:]))


def _checkpoint(parent: RunLayout, step: int) -> tuple[CheckpointManifest | None, str | None]:
    if not step:
        return None, None
    path = parent.checkpoint_manifest(step)
    data = read_optional(path)
    if data is None:  # its run goes on, and has retired it since the survey
        raise CorruptArtefactError(f"{path} is missing", mend="choose a newer checkpoint", unseen=path)
    return CheckpointManifest.from_bytes(data, str(path)), digest_bytes(data)


def _weights(
    parent: RunLayout, incarnations: Sequence[IncarnationRecord], oldest: int, wish: int, step: int
) -> tuple[WeightsManifest, ...]:
    """Manifests of the shortest chain that ends with ``step`` and begins with a full copy at or below ``wish``, or else with
    the oldest full copy that is kept.

    Raises:
        RunMismatchError: the version of that step cannot be rebuilt from what is kept.
    """
    accept = Seals(incarnations).accept_weights
    chain: list[WeightsManifest] = []
    whole: list[WeightsManifest] = []
    for version in range(step, oldest - 1, -1):
        manifest = None if is_retired(parent, version) else read_manifest(parent, version)
        if manifest is None or not accept(manifest):
            break
        chain.insert(0, manifest)
        if manifest.keyframe is not None:
            whole = list(chain)
            if version <= wish:
                break
        if manifest.parent is None:
            break
    if not whole:
        raise RunMismatchError(
            f"policy version {step} of {parent.root} was retired: its checkpoint is kept, its weights are not",
            mend="fork from a newer checkpoint (--fork-step); `weights.retire: false` in the recipe keeps all of them",
        )
    return tuple(whole)
