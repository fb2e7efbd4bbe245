"""Putting what is broken or orphaned out of the way, and saying what the next start will do.

Owns the moves to ``quarantine/``; never deletes, and never touches ``run.json``, the recipe, ``model/``, a fork's proofs or an
incarnation's record (without them nobody knows who may write). Crash states: each move is durable by itself; killed midway,
the rest is found again by the next audit. The fence is checked before each move, so that a controller that starts meanwhile
ends it.
The pages behind it are ``docs/audit.md`` and ``docs/protocol.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from milesbatch.audit.findings import Findings, ranges
from milesbatch.decisions.resume import ResumePlan, plan_resume
from milesbatch.errors import CorruptArtefactError, InputError, RunHeldError
from milesbatch.records import IncarnationRecord
from milesbatch.store.durable import move_to_quarantine
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout, TrajectoryName
from milesbatch.store.liveness import is_alive
from milesbatch.store.run import open_run
from milesbatch.store.survey import Survey, read_incarnations, survey
from milesbatch.trajectories.reader import read_table

_STARTING_MODEL = "the starting model"


@dataclass(frozen=True, slots=True)
class Repair:
    """What was moved (path relative to the run, reason), and what the next start will do, a sentence each."""

    moved: tuple[tuple[str, str], ...]
    next_start: tuple[str, ...]


def refuse_living(layout: RunLayout) -> None:
    """Return only when no controller of the run is alive.

    Raises:
        RunHeldError: one is; says which.
    """
    try:
        records = read_incarnations(layout)
    except CorruptArtefactError:
        return  # nothing will be moved either
    if records and is_alive(layout, records[-1]):
        newest = records[-1]
        raise RunHeldError(
            f"{layout.root} is held by incarnation {newest.incarnation}: process {newest.pid} on {newest.host}"
            f" (job {newest.job_id}), which is alive; nothing was moved",
            mend="end it first, then repair",
        )


def repair(layout: RunLayout, findings: Findings) -> Repair:
    """Move everything in ``findings.movable`` to quarantine, unless the run cannot be continued anyway.

    Raises:
        RunHeldError: a controller is alive.
        FencedError: a controller has taken over meanwhile; what was moved by then stays moved.
        StorageError: a move failed.
    """
    refuse_living(layout)
    blockers = _blockers(layout, findings)
    if blockers:
        return Repair((), tuple(blockers))
    incarnations = read_incarnations(layout)
    fence = Fence(layout, len(incarnations))
    moved = []
    for path, reason in sorted(findings.movable.items()):
        fence.check()
        if path.exists():  # a file may have gone with its directory
            move_to_quarantine(path, layout.quarantine, reason)
            moved.append((findings.relative(path), reason))
    return Repair(tuple(moved), tuple(describe_next_start(layout, incarnations, findings)))


def _blockers(layout: RunLayout, findings: Findings) -> list[str]:
    """Damage that no start can go around: what the run is, and who may write."""
    files = (layout.run_record, layout.recipe, layout.fork)
    folders = (layout.model, layout.parent, layout.incarnations)
    fixed = (*(path.name for path in files), *(f"{path.name}/" for path in folders))
    kinds = ("damaged", "missing", "mismatch", "unreadable")
    paths = sorted({v.path for v in findings.violations if v.kind in kinds and v.path.startswith(fixed)})
    if not paths:
        return []
    return [f"cannot be continued: {', '.join(paths)} must be put back from a copy; nothing was moved"]


def describe_next_start(layout: RunLayout, incarnations: list[IncarnationRecord], findings: Findings) -> list[str]:
    """What the next start will do, decided by the same survey and plan as the start itself."""
    steps = _steps(layout, incarnations)
    found = survey(layout, incarnations)
    if steps is not None and layout.checkpoint_manifest(steps).exists():
        return [f"will do nothing: the run is finished (checkpoint {steps} of {steps} steps is there)"]
    try:
        plan = plan_resume(found.checkpoints, found.last_batch, found.last_version, found.origin.step)
    except CorruptArtefactError as error:
        return [f"cannot be continued: {error}"]
    missing = _unreplayable(layout, found, plan)
    if missing:
        return [f"cannot be continued: step {step} must be replayed, but {what}" for step, what in missing]
    return [*_words(plan, found), *_dropped(layout, found, findings), *_again(found, findings)]


def _steps(layout: RunLayout, incarnations: list[IncarnationRecord]) -> int | None:
    if not incarnations:
        return None
    try:
        return open_run(layout, incarnations[-1].incarnation).recipe.steps
    except InputError:
        return None


def _unreplayable(layout: RunLayout, found: Survey, plan: ResumePlan) -> list[tuple[int, str]]:
    problems = []
    for step in plan.replayed:
        files = {group.path: group.digest for group in found.batch(step).trained}
        for name, digest in sorted(files.items()):
            try:
                read_table(layout.trajectory(name), digest=digest)
            except CorruptArtefactError as error:
                problems.append((step, error.what))
    return problems


def _words(plan: ResumePlan, found: Survey) -> list[str]:
    start = f"checkpoint {plan.checkpoint_step}" if plan.from_checkpoint else _STARTING_MODEL
    if not plan.replayed:
        return [f"will go on from {start} with step {plan.last_batch + 1}"]
    words = [f"will replay steps {ranges(list(plan.replayed))} from {start}"]
    if found.last_version < plan.last_batch:
        again = ranges(list(range(found.last_version + 1, plan.last_batch + 1)))
        words.append(f"will publish policy versions {again} again")
    return words


def _dropped(layout: RunLayout, found: Survey, findings: Findings) -> list[str]:
    """What the take-over itself will put out of the way, because it follows something that is broken."""
    paths = sorted({findings.relative(path) for path, _ in found.broken if path.exists()})
    records = [path for path in paths if path.startswith(f"{layout.batches.name}/")]
    words = []
    if records:
        words.append(f"will decide {len(records)} recorded steps again, from step {found.last_batch + 1} on")
    if paths:
        words.append(f"will move {len(paths)} more artefacts to quarantine: {', '.join(paths[:5])}{_more(paths)}")
    return words


def _more(paths: list[str]) -> str:
    return f" and {len(paths) - 5} more" if len(paths) > 5 else ""


def _again(found: Survey, findings: Findings) -> list[str]:
    """Groups whose only file was moved away, and that have no fate."""
    ready = {g for name in found.ready_files for g in range(name.first_group, name.last_group + 1)}
    fates = found.fates
    lost: set[int] = set()
    for path in (*findings.movable, *(path for path, _ in found.broken)):
        try:
            name = TrajectoryName.parse(path.name)
        except ValueError:
            continue
        lost.update(g for g in range(name.first_group, name.last_group + 1) if fates.is_pending(g) and g not in ready)
    return [f"will generate groups {ranges(sorted(lost))} again"] if lost else []
