"""Record one run, build every state that a crash may leave, continue the run from each, and compare the ends.

record() ──> crash_states() ──> distinct ones ──> continue_from() each, on a few processes ──> Report
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from crash_life import Script, live, live_to_the_end
from crash_log import Killed, Mutation, MutationLog, QuickOperations, RecordingOperations, noted_events
from crash_scene import STEPS, crash_recipe
from crash_states import (
    CrashState,
    Disk,
    Files,
    build,
    content_key,
    crash_states,
    keep_all,
    keep_none,
    synced_only,
    unsettled,
    whole,
)

from milesbatch.audit.prove import audit_run
from milesbatch.report.status import is_finished
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import installed
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.weights.reader import read_manifest

STOP_AFTER = 3
SLOW_BLOCK = 4
KILLED_AT = "weights/000005/manifest.json"
SECOND_CRASHES = (0.1, 0.5, 1.0)
"""Shares of the mutations of a continued run after which the power fails."""
IMMUTABLE = ("incarnations", "batches")
TWIN_REASONS = ("another file holds the same groups", "another worker's file of the same groups was committed first")
"""A block that was made twice: the only thing that a crash between commit and telling may put into quarantine."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What must not depend on whether, where and how often a run was killed."""

    digests: tuple[str, ...]
    fates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The undisturbed run's ending, and the mutations of one that is stopped, killed and continued."""

    ending: Ending
    mutations: Sequence[Mutation]


@dataclass
class Report:
    """What a search found."""

    mutations: int
    states: int = 0
    distinct: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.mutations} mutations, {self.states} states, {self.distinct} distinct,"
            f" {len(self.failures)} failures, {self.seconds:.0f} s"
        )


def undisturbed(root: Path) -> Ending:
    """A run in one life."""
    layout = RunLayout(root / "run")
    with installed(QuickOperations()):
        live_to_the_end(layout, crash_recipe())
    return ending_of(layout)


def record(root: Path, deaf: frozenset[str] = frozenset()) -> Sequence[Mutation]:
    """Mutations of a run of three lives.

    The first stops after step 3, with a checkpoint, and has a worker that is taken for lost after it wrote a block; the
    second is killed before the manifest of version 5 is linked; the third goes on to the end. The first publishes each version
    before it goes on; the others, and all lives that continue from a crash, as late as they may.
    """
    layout, recipe = RunLayout(root / "run"), crash_recipe()
    log = MutationLog(root, deaf)
    events = noted_events(log)
    with installed(RecordingOperations(log)):
        live(layout, recipe, Script(stop_after=STOP_AFTER, slow_block=SLOW_BLOCK, publishes_at_once=True), events)
        log.kill_at = lambda mutation: mutation.kind == "link" and mutation.target.endswith(KILLED_AT)
        with contextlib.suppress(Killed):
            live(layout, recipe, Script(), events)
        assert log.is_dead, f"the second life was to be killed at {KILLED_AT}"
        log.is_dead, log.kill_at = False, lambda mutation: False
        live(layout, recipe, Script(), events)
    assert is_finished(layout, recipe.steps)
    return log.mutations


def ending_of(layout: RunLayout) -> Ending:
    """Weights digest of every version and fate of every group, as a reader finds them."""
    digests = []
    for version in range(STEPS + 1):
        manifest = read_manifest(layout, version)
        digests.append("missing" if manifest is None else manifest.weights_digest)
    fates = survey(layout, read_incarnations(layout)).fates.fates
    return Ending(tuple(digests), tuple(f"{group} {fate}" for group, fate in sorted(fates.items())))


def continue_from(state: CrashState, expected: Ending, root: Path) -> list[str]:
    """Go on from ``state``, below ``root``, to the end; what is wrong then."""
    build(state.files, root)
    layout, recipe = RunLayout(root / "run"), crash_recipe()
    with installed(QuickOperations()):
        was_finished = is_finished(layout, recipe.steps)
        live_to_the_end(layout, recipe)
    problems = []
    found = ending_of(layout)
    if found.digests != expected.digests:
        problems.append(f"weights digests {found.digests}, expected {expected.digests}")
    if found.fates != expected.fates:
        problems.append(f"fates {found.fates}, expected {expected.fates}")
    problems += [f"audit: {finding}" for finding in audit_run(layout).violations]
    if not was_finished:
        problems += [f"left behind: {path}" for path in root.rglob(f"{TEMPORARY_PREFIX}*")]
    problems += _quarantine_problems(layout)
    problems += _changed(state.durable, root)
    return problems


def _quarantine_problems(layout: RunLayout) -> list[str]:
    problems = []
    for path in layout.quarantine.iterdir():
        if not path.name.endswith(".reason.txt"):
            reason = path.with_name(path.name + ".reason.txt")
            text = reason.read_text().strip("\n\0") if reason.exists() else ""
            # The reason is a note for people, and may be torn.
            if not path.name.startswith("trajectories.") or not any(r.startswith(text) for r in TWIN_REASONS):
                problems.append(f"quarantined: {path.name}: {text}")
    return problems


def _changed(durable: Files, root: Path) -> list[str]:
    """Committed and durable before the crash: must be there at the end as it was."""
    problems = []
    for path, data in durable.items():
        if data is not None and _is_immutable(path):
            file = root / path
            if not file.exists():
                problems.append(f"lost: {path}, which was durable")
            elif file.read_bytes() != data:
                problems.append(f"changed: {path}, which was committed")
        if data is not None and path.endswith(".arrow") and "/trajectories/" in path:
            name = Path(path).name
            is_there = (root / path).exists() or any(root.glob(f"run/quarantine/trajectories.{name}.*"))
            if not is_there and not _has_twin(path, durable, root):
                problems.append(f"lost: {path}, which was durable")
    return problems


def _has_twin(path: str, durable: Files, root: Path) -> bool:
    """Was the block made twice before the crash, and is the other file there? Then this one was on its way to quarantine,
    and the power failed between the two names of its rename."""
    block = Path(path).name.partition(".")[0]
    return any(Path(p).name.startswith(f"{block}.") and p != path and (root / p).exists() for p in durable)


def _is_immutable(path: str) -> bool:
    parts = path.split("/")[1:]
    is_record = parts[0] in IMMUTABLE and parts[-1].endswith(".json")
    is_kept = parts[0] == "weights" and parts[-1] in ("manifest.json", "retired.json")
    return parts == ["run.json"] or is_record or is_kept


# -- searching ------------------------------------------------------------------------------------------------------


def search(
    recording: Recording, behind: Collection[int] | None = None, *, processes: int = 1, stop_at: int | None = None
) -> Report:
    """Continue from every distinct state behind the mutations ``behind`` (all); ends early after ``stop_at`` failures."""
    began_s = time.monotonic()
    report = Report(mutations=len(recording.mutations))
    distinct: dict[object, CrashState] = {}
    for state in crash_states(recording.mutations, behind):
        report.states += 1
        distinct.setdefault(content_key(state.files), state)
    report.distinct = len(distinct)
    expected = recording.ending
    jobs = [functools.partial(continue_from, state, expected) for state in distinct.values()]
    _try_all(jobs, report, processes, stop_at)
    report.seconds = time.monotonic() - began_s
    return report


def search_twice(
    recording: Recording, behind: Collection[int] | None = None, *, processes: int = 1, stop_at: int | None = None
) -> Report:
    """Kill the processes wherever a name is visible but not durable, continue, and let the power fail during that.

    What the second life saw must not vanish under what it built on it.
    """
    began_s = time.monotonic()
    report = Report(mutations=len(recording.mutations))
    jobs = []
    for number, disk in unsettled(recording.mutations):
        if behind is None or number in behind:
            jobs.append(functools.partial(crash_twice, number, disk, recording.ending))
    report.states = report.distinct = len(jobs) * len(SECOND_CRASHES)
    _try_all(jobs, report, processes, stop_at)
    report.seconds = time.monotonic() - began_s
    return report


def crash_twice(number: int, disk: Disk, expected: Ending, root: Path) -> list[str]:
    """Killed behind mutation ``number``, continued, and without power at some point of that, or after it."""
    problems = []
    build(disk.files(keep_all, whole), root / "first")
    log = MutationLog(root / "first")
    with installed(RecordingOperations(log)):
        live_to_the_end(RunLayout(root / "first" / "run"), crash_recipe())
    done = 0
    for until in sorted({round(len(log.mutations) * share) for share in SECOND_CRASHES}):
        for mutation in log.mutations[done:until]:
            disk.apply(mutation)
        done = until
        kind = f"killed, and power lost {until} mutations later"
        state = CrashState(number, kind, disk.files(keep_none, synced_only), disk.files(keep_none, synced_only))
        place = root / f"second-{until}"
        problems += [f"{kind}: {problem}" for problem in continue_from(state, expected, place)]
    return problems


_jobs: Sequence[functools.partial[list[str]]] = ()
"""Inherited by the forked processes."""


def _try_all(jobs: Sequence[functools.partial[list[str]]], report: Report, processes: int, stop_at: int | None) -> None:
    global _jobs
    _jobs = jobs
    torch.set_num_threads(1)
    numbers = range(len(jobs))
    if processes == 1:
        _collect(map(_try, numbers), report, stop_at)
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            _collect(pool.imap_unordered(_try, numbers, chunksize=8), report, stop_at)


def _collect(results: Iterable[str | None], report: Report, stop_at: int | None) -> None:
    for failure in results:
        if failure is not None:
            report.failures.append(failure)
            if stop_at is not None and len(report.failures) >= stop_at:
                return


def _try(number: int) -> str | None:
    job = _jobs[number]
    root = Path(tempfile.mkdtemp(prefix="crash-", dir=_fast_directory()))
    try:
        problems = job(root)
    except Exception:  # noqa: BLE001 - whatever comes out of a continued run is a finding
        problems = [traceback.format_exc(limit=-6)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return f"{' '.join(map(str, job.args[:1]))}:\n  " + "\n  ".join(problems) if problems else None


def _fast_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
