"""The trainer's loop: resume, replay, then step after step.

    load checkpoint c ──> replay c+1..k with the recorded batches ──> for step k+1 ...:
        rank 0: ask for finished groups ─> write the batch record (commit) ─> all ranks: train ─> gather the weights
        beside step k+2 and what comes before it: encode, write and commit version k+1
        every N steps, and on a stop signal: checkpoint in the background

The order of effects that recovery relies on (docs/protocol.md, rule 4): the batch record of step k is committed before step
k computes; version k is published after it, and before version k+1 is begun; checkpoint k is committed after version k. So a
crash at any instant leaves at most the newest two records without their versions (replayed, then published), versions without
a checkpoint (replayed, digests compared), or both. Replays, and runs without staleness, publish before they go on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from milesbatch.backends.protocol import TrainerBackend
from milesbatch.cluster.context import RoleContext
from milesbatch.decisions.fates import FateTable
from milesbatch.decisions.origin import origin_of
from milesbatch.decisions.resume import ResumePlan, plan_resume
from milesbatch.errors import CorruptArtefactError, StoppedToContinue, StorageFullError
from milesbatch.faults.points import point
from milesbatch.records import BatchRecord, GroupRef
from milesbatch.store.clock import utc_now
from milesbatch.store.events import EventLog
from milesbatch.store.fence import Fence
from milesbatch.store.patience import Patience
from milesbatch.store.run import OpenRun
from milesbatch.store.settle import settle
from milesbatch.store.sight import sight_of
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trainer.batch import read_groups, sift, step_data
from milesbatch.trainer.broadcasting import Broadcasting
from milesbatch.trainer.checkpointing import Checkpointer, CheckpointFacts, read_checkpoint
from milesbatch.trainer.overlap import Overlap
from milesbatch.trainer.publishing import Publishing
from milesbatch.trainer.recording import commit_batch_record
from milesbatch.trainer.restoring import restore_groups
from milesbatch.trainer.retiring import Retiring
from milesbatch.trainer.telling import Telling
from milesbatch.weights.team import Team
from milesbatch.wire import messages as wire
from milesbatch.wire.client import Controller, Pulse

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resume:
    """What rank 0 found on disk and all ranks follow: one rank decides, the others receive."""

    plan: ResumePlan
    records: tuple[BatchRecord, ...]
    divergences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Mend:
    """Rank 0 asks all ranks to make these policy versions reachable, before it says what they wait for."""

    versions: tuple[int, ...]


class TrainerLoop:
    """One rank of the trainer."""

    def __init__(
        self,
        context: RoleContext,
        run: OpenRun,
        backend: TrainerBackend,
        controller: Controller,
        pulse: Pulse,
        events: EventLog,
        team: Team,
        overlap: Overlap,
    ) -> None:
        """``team``: what the ranks' publishers talk through; ``overlap``: where they run beside the training."""
        self._context = context
        self._layout = run.layout
        self._recipe = run.recipe
        self._backend = backend
        self._controller = controller
        self._pulse = pulse
        self._events = events
        self._telling = Telling(controller, pulse, events)
        self._is_first = context.index == 0
        self.fence = Fence(run.layout, context.incarnation)
        self._origin = origin_of(run.record)
        self._fates = FateTable.beginning_at(self._origin)
        self._patience = Patience(run.recipe.slurm.disk_full_wait_s, self._telling.full)
        self._sight = sight_of(run.layout.root, run.recipe.slurm.visible_wait_s, self._telling.unseen)
        broadcasting = None
        if self._is_first and run.recipe.weights.transport != "delta":
            broadcasting = Broadcasting(context, run.recipe, controller, pulse, events)
        self._publishing = Publishing(
            run.layout, run.recipe, self.fence, backend, team, context.count, overlap, self._patience, self._sight,
            self._telling.unusual, broadcasting,
        )  # fmt: skip
        self._retiring = Retiring(run.layout, run.recipe, self.fence)
        self._checkpointed = -1
        self._save_began_s = 0.0

    def run(self, checkpointer: Checkpointer) -> None:
        """Train until the recipe's steps are done, or until the controller says stop."""
        resume = _agree(self._find_resume() if self._is_first else None)
        assert resume is not None
        self._load(resume, checkpointer)
        step = resume.plan.checkpoint_step
        while step < self._recipe.steps:
            began_s = time.monotonic()
            record = self._next_record(step + 1, resume)
            if record is None:
                break
            step += 1
            self._train(record, checkpointer, is_replay=step <= resume.plan.last_batch, began_s=began_s)
            self._maybe_checkpoint(checkpointer, step)
        self._publishing.close()
        self._last_checkpoint(checkpointer, step)
        self._pulse.state = "waiting"  # for what runs in the background: no hang, however long it takes
        try:
            checkpointer.close()
        except StorageFullError as error:  # what was to be deleted stays; all that must be there is committed
            self._telling.full(error.what)
        if step >= self._recipe.steps and self._is_first:
            self._controller.tell("finished", wire.Finished(step=step))
        _meet()  # a rank that left earlier would look as if it had died

    # -- resume -----------------------------------------------------------------------------------------------------

    def _find_resume(self) -> Resume:
        """Rank 0 looks at the files; a restart inside an incarnation finds this incarnation's own artefacts too."""
        told = self._controller.ask("to-publish-again", wire.UnreachableRequest(), wire.UnreachableVersions)
        lost = told.versions
        layout, own = self._layout, self._context.incarnation
        incarnations = self._sight.until_seen(lambda: read_incarnations(layout, at_least=own))
        found = self._sight.until_complete(
            lambda: survey(
                layout, incarnations, last_batch=told.recorded, last_version=told.published, origin=self._origin
            ),
            lambda found: found.unseen,
        )
        missing = layout.batch(found.last_batch + 1)
        if missing in found.unseen:
            raise CorruptArtefactError(
                f"{missing} was committed, and cannot be seen on this host",
                mend="look whether all nodes see the same run directory; if the file is lost, the next start decides again",
            )
        self._patience.until_space(lambda: settle(layout, incarnations, found))
        self._publishing.distrust(lost)
        self._refuse_lost_origin(lost)
        last_version = min([found.last_version, *(version - 1 for version in lost)])
        plan = plan_resume(found.checkpoints, found.last_batch, last_version, self._origin.step)
        divergences: tuple[int, ...] = ()
        if plan.from_checkpoint:
            manifest = self._sight.until_seen(lambda: read_checkpoint(layout, plan.checkpoint_step))
            divergences = manifest.divergences
        self._events.write(
            "resume",
            checkpoint=plan.checkpoint_step if plan.from_checkpoint else None,
            replays=len(plan.replayed),
            last_batch=plan.last_batch,
            last_version=last_version,
        )
        return Resume(plan, tuple(found.batches), divergences)

    def _refuse_lost_origin(self, lost: Sequence[int]) -> None:
        """A fork cannot make versions below its origin again: it has neither their batch records nor a checkpoint there.

        Raises:
            CorruptArtefactError: workers need such a version and cannot rebuild it.
        """
        below = [version for version in lost if version < self._origin.step]
        if below:
            raise CorruptArtefactError(
                f"policy version {below[0]} came from the run that this one was forked from, and cannot be rebuilt any more",
                mend=f"put {self._layout.weights_version(below[0])} back from a copy, or fork again with --fork",
            )

    def _load(self, resume: Resume, checkpointer: Checkpointer) -> None:
        self._pulse.state = "loading"
        plan = resume.plan
        for record in resume.records[: plan.checkpoint_step - self._origin.step]:
            self._fates.add(record)
        self._publishing.divergences = list(resume.divergences)
        if plan.from_checkpoint:
            state = self._backend.state_dict()
            manifest = checkpointer.restore(plan.checkpoint_step, state, self._sight)
            self._backend.load_state_dict(state)
            self._checkpointed = plan.checkpoint_step
            if plan.is_published:
                self._publishing.resume_at(plan.checkpoint_step, manifest.weights_digest)
            else:
                self._publishing.publish(plan.checkpoint_step, moved=False)
        else:
            self._publishing.publish(0, moved=False)
        if self._is_first:
            self._telling.published(self._publishing.version)
        point("trainer.loaded")

    # -- one step ---------------------------------------------------------------------------------------------------

    def _next_record(self, step: int, resume: Resume) -> BatchRecord | None:
        """The batch record of ``step``, recorded before or made now; None to stop. The same on all ranks."""
        record: BatchRecord | None = None
        if self._is_first:
            if step <= resume.plan.last_batch:
                record = None if self._pulse.should_stop else resume.records[step - 1 - self._origin.step]
            else:
                record = self._make_record(step)
            if record is not None:
                self._telling.recorded(record)
        else:
            self._pulse.state = "waiting"
        return self._received(record)

    def _make_record(self, step: int) -> BatchRecord | None:
        """Rank 0: wait for finished groups, decide their fates, and commit the record."""
        while True:
            # A version that is on its way is work: should it hang, that is found.
            self._pulse.state = "waiting" if self._publishing.is_idle else "training"
            answer = self._controller.batch(step)
            if answer.stop:
                return None
            self._mend_weights(answer.unreachable)
            if answer.ready:
                break
        self._pulse.state = "training"
        trajectories = read_groups(self._layout, answer.trained, self._sight)
        trained, rejected = sift(answer.trained, trajectories, self._recipe.algorithm)
        fates = {group.group_id for group in trained} | {r.group_id for r in (*answer.rejected, *rejected)}
        record = BatchRecord(
            step=step,
            incarnation=self._context.incarnation,
            trained=trained,
            rejected=(*answer.rejected, *rejected),
            stream_position=max(self._fates.stream_position, max(fates, default=-1) + 1),
            created_at=utc_now(),
        )
        self._patience.until_space(lambda: commit_batch_record(self._layout, record, self.fence, self._sight))
        return record

    def _mend_weights(self, unreachable: tuple[int, ...]) -> None:
        """Rank 0: workers cannot rebuild these versions. Without bitwise mode they only need the newest one."""
        if not unreachable:
            return
        versions = unreachable if self._recipe.determinism == "bitwise" else (self._publishing.version,)
        self._events.write("weights_mended", versions=list(versions))
        _agree(_Mend(versions))
        self._publishing.mend(versions)
        for version in versions:
            self._telling.published(version)

    def _received(self, value: T) -> T:
        """Rank 0's value, on all ranks, which until it comes do their part in what rank 0 mends."""
        while isinstance(found := _agree(value), _Mend):
            self._publishing.mend(found.versions)
        return found

    def _train(self, record: BatchRecord, checkpointer: Checkpointer, *, is_replay: bool, began_s: float) -> None:
        point("trainer.recorded")
        waited_s = time.monotonic() - began_s
        self._pulse.state = "replaying" if is_replay else "training"
        self._fates.add(record)
        groups = self._whole_groups(record) if is_replay else record.trained
        trajectories = read_groups(self._layout, groups, self._sight)
        sampling = self._recipe.rollout.sampling
        data = step_data(record, trajectories, self._recipe.algorithm, sampling.temperature)
        metrics = self._backend.train_step(record.step, data.samples, checkpointer.await_copy)
        trained_s = time.monotonic()
        self._pulse.moved()
        point("trainer.trained")
        figures = {
            **data.metrics,
            **{name: value for name, value in asdict(metrics).items() if value is not None},
            "wait_s": waited_s,
            "train_s": trained_s - began_s - waited_s,
        }

        def then(published: dict[str, float]) -> None:
            self._pulse.policy_version = record.step
            point("trainer.published")
            if self._is_first:
                self._telling.published(record.step)
                self._telling.step(record.step, is_replay, self._publishing.weights_digest, {**figures, **published})
            self._pulse.moved()

        # Replays are compared one by one; without staleness the next step's groups are made by this very version.
        waits = is_replay or self._recipe.rollout.staleness == 0
        moved = metrics.grad_norm > 0 and metrics.learning_rate > 0
        self._publishing.begin(record.step, moved=moved, then=then, waits=waits)
        if waits:
            self._publishing.finish()
        self._pulse.moved()

    def _whole_groups(self, record: BatchRecord) -> tuple[GroupRef, ...]:
        """Where a replayed step's groups are: damaged files are replaced. The same on all ranks."""
        is_bitwise = self._recipe.determinism == "bitwise"
        first = self._is_first
        if first:
            return self._received(restore_groups(self._layout, record, is_bitwise, self._regenerate, self._sight))
        return self._received(record.trained)

    def _regenerate(self, groups: tuple[int, ...]) -> tuple[GroupRef, ...]:
        self._events.write("regenerating", groups=list(groups))
        self._pulse.state = "waiting"
        while not (answer := self._controller.regenerate(groups)).groups:
            # Versions that this replay has not come to yet are published by it anyway.
            self._mend_weights(tuple(v for v in answer.unreachable if v <= self._publishing.version))
            if self._pulse.should_stop:
                raise StoppedToContinue("stopped while lost groups were generated again")
        self._pulse.state = "replaying"
        return answer.groups

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _maybe_checkpoint(self, checkpointer: Checkpointer, step: int) -> None:
        """Commit the running checkpoint if it is written; begin the next one when it is due. All ranks decide alike."""
        is_due = step % self._recipe.checkpoint.every == 0 and step < self._recipe.steps
        if is_due or _agree(checkpointer.is_written):
            self._finish_checkpoint(checkpointer)
        if is_due:
            self._start_checkpoint(checkpointer, step)

    def _last_checkpoint(self, checkpointer: Checkpointer, step: int) -> None:
        """The state before leaving is worth waiting for, even on a full disk."""
        self._finish_checkpoint(checkpointer)
        deadline_s = time.monotonic() + self._patience.wait_s
        while self._start_checkpoint(checkpointer, step) and not self._finish_checkpoint(checkpointer):
            if _agree(time.monotonic() > deadline_s):
                raise StorageFullError(
                    f"no space for checkpoint {step} in {self._layout.checkpoints}",
                    mend="free space there and give the same command again; nothing was lost",
                )
            time.sleep(1.0)

    def _start_checkpoint(self, checkpointer: Checkpointer, step: int) -> bool:
        """Begin to write the state after ``step``; False when there is nothing to write."""
        if step == 0 or step <= self._checkpointed or _agree(self._is_first and checkpointer.has(step, self._sight)):
            return False
        began_s = self._save_began_s = time.monotonic()
        if self._is_first:
            self._patience.until_space(lambda: checkpointer.prepare(step))
        _meet()
        checkpointer.start(self._backend.state_dict(), self._facts(step))
        point("trainer.checkpoint_started")
        self._events.write("checkpoint_started", step=step, stall_s=round(time.monotonic() - began_s, 4))
        return True

    def _finish_checkpoint(self, checkpointer: Checkpointer) -> bool:
        """Commit what is being written; False, on all ranks, when the disk was too full for it (the one before stays)."""
        committed, is_full = None, False
        try:
            committed = checkpointer.finish(self._settled)
        except StorageFullError as error:
            is_full = True
            self._telling.full(error.what)
        committed, is_full = _agree((committed, is_full))
        if committed is not None:
            self._checkpointed = committed
            if self._is_first:
                oldest_held = self._tell_checkpointed(committed)
                checkpointer.later(functools.partial(self._retire_weights, committed, oldest_held))
        return not is_full

    def _retire_weights(self, step: int, oldest_held: int | None) -> None:
        """In the background: the checkpoint of ``step`` is committed. On a full disk nothing is retired until the next one."""
        try:
            retired = self._retiring.retire(step, oldest_held)
        except StorageFullError as error:
            self._telling.full(error.what)
            return
        if retired is not None:
            self._events.write("weights_retired", first=retired.first, last=retired.last, base=retired.base)

    def _facts(self, step: int) -> CheckpointFacts:
        since = max(self._checkpointed, 0)
        pending: tuple[GroupRef, ...] = ()
        if self._is_first:
            pending = self._controller.ask("pending", wire.PendingRequest(), wire.PendingAnswer).groups
        fates = {str(g): str(fate) for g, fate in sorted(self._fates.fates.items()) if fate.step > since}
        return CheckpointFacts(
            step=step,
            weights_digest="",  # known when the version is published: see _settled
            stream_position=self._fates.stream_position,
            fates_since=since,
            fates=fates,
            pending=tuple(group for group in pending if self._fates.is_pending(group.group_id)),
            divergences=tuple(self._publishing.divergences),
        )

    def _settled(self, facts: CheckpointFacts) -> CheckpointFacts:
        """Rank 0, just before the commit: what is known only once the version of that step is published."""
        digest = self._publishing.digest_of(facts.step)
        divergences = tuple(version for version in self._publishing.divergences if version <= facts.step)
        return replace(facts, weights_digest=digest, divergences=divergences)

    @property
    def patience(self) -> Patience:
        return self._patience

    # -- telling the controller -------------------------------------------------------------------------------------

    def _tell_checkpointed(self, step: int) -> int | None:
        """Returns the oldest policy version that a worker holds, None when that is not known."""
        point("trainer.checkpoint_committed")
        self._events.write("checkpoint_committed", step=step)
        message = wire.Checkpointed(step=step, seconds=time.monotonic() - self._save_began_s)
        return self._controller.ask("checkpointed", message, wire.CheckpointedAnswer).oldest_held


def _agree(value: T) -> T:
    """Rank 0's value, on all ranks. Without a process group there is one rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def _meet() -> None:
    """All ranks have come here."""
    if dist.is_initialized():
        dist.barrier()
