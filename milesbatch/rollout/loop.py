"""The rollout worker's loop.

    lease (which groups, which version) -> follow the weights -> generate -> judge -> commit the file -> tell the controller

Bitwise mode: one lease at a time, decoded as one fixed batch under exactly the version that the lease names. Relaxed mode:
several leases are open at once, the engine keeps its batch full, and newer weights are swapped in between two decoding
steps while samples are running (their tokens carry the version that made them). Told to stop, a worker in relaxed mode ends
decoding at once, saves what is begun (:mod:`milesbatch.rollout.unfinished`), and commits what is done; the next incarnation
goes on with it. In bitwise mode it finishes its block: begun ones would be generated again with the same result.

Crash states: killed before the commit of the file, nothing happened and the lease is handed out again. Killed between the
commit and telling: the file is found and accepted by the next take-over; within the same incarnation the block is
generated again and the second file is the one that counts (the first is quarantined by the next take-over).
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import FIRST_COMPLETED, wait
from datetime import UTC, datetime

from milesbatch.cluster.context import RoleContext
from milesbatch.decisions.batching import BatchRule
from milesbatch.engines.protocol import RolloutEngine
from milesbatch.errors import DataError, StoppedToContinue
from milesbatch.faults.points import point
from milesbatch.rollout.episodes import Episode, EpisodeRunner, Recorder
from milesbatch.rollout.open_lease import OpenLease, submit
from milesbatch.rollout.reaching import reach_of
from milesbatch.rollout.staged import StagedFollower
from milesbatch.rollout.unfinished import UnfinishedEpisodes
from milesbatch.store.durable import move_to_quarantine
from milesbatch.store.events import EventLog
from milesbatch.store.fence import Fence
from milesbatch.store.patience import Patience
from milesbatch.store.run import OpenRun
from milesbatch.store.sight import sight_of
from milesbatch.trajectories.groups import refs_of
from milesbatch.trajectories.inflight_schema import InflightMetadata
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.trajectories.writer import write_trajectories
from milesbatch.weights.follower import Follower
from milesbatch.wire import messages as wire
from milesbatch.wire.client import Controller, Pulse

_POLL_S = 0.05
_LONGEST_LOOK_S = 5.0
"""For how long a file of unfinished episodes is looked for that a shared filesystem shows late."""


class WorkerLoop:
    """One rollout worker at work."""

    def __init__(
        self,
        context: RoleContext,
        run: OpenRun,
        engine: RolloutEngine,
        runner: EpisodeRunner,
        follower: Follower | StagedFollower,
        controller: Controller,
        pulse: Pulse,
        events: EventLog,
        metadata: FileMetadata,
    ) -> None:
        self._context = context
        self._layout = run.layout
        self._recipe = run.recipe
        self._engine = engine
        self._runner = runner
        self._is_bitwise = run.recipe.determinism == "bitwise"
        self._reach = reach_of(run.recipe, follower, controller, pulse, events)
        self._controller = controller
        self._pulse = pulse
        self._events = events
        self._metadata = metadata
        self._fence = Fence(run.layout, context.incarnation)
        self._patience = Patience(run.recipe.slurm.disk_full_wait_s, self._tell_full)
        self._digests: dict[int, str] = {}
        self._open: list[OpenLease] = []
        recipe = run.recipe
        self._unfinished = UnfinishedEpisodes(
            run.layout,
            Recorder(context.name, context.incarnation),
            InflightMetadata(metadata.run_id, metadata.tokenizer_digest),
            BatchRule(recipe.trainer.groups_per_step, recipe.rollout.staleness, self._is_bitwise),
            self._reach.published_digest,
            events,
            sight_of(run.layout.root, min(recipe.slurm.visible_wait_s, _LONGEST_LOOK_S), self._tell_late),
        )

    def run(self) -> None:
        """Work until the controller says stop.

        Raises:
            FencedError: a newer incarnation has taken over.
            StoppedToContinue: the controller is gone, or said stop while this worker waited for weights.
            CorruptArtefactError: the weights cannot be rebuilt from any chain.
            StorageError: trajectories cannot be written.
        """
        try:
            while self._take_leases():
                self._pulse.state = "generating" if self._open else "waiting"
                self._follow_newest()
                for lease in self._finished():
                    self._open.remove(lease)
                    self._commit(lease)
        except StoppedToContinue:
            self._leave()
            raise
        self._leave()

    # -- leases -----------------------------------------------------------------------------------------------------

    def _take_leases(self) -> bool:
        """Take what there is room for; waits only when idle. False when it is time to stop."""
        if not self._is_bitwise and self._pulse.should_stop:  # a busy engine has no room, and asks for no lease
            return False
        while not self._open or (not self._is_bitwise and self._has_room()):
            idle = not self._open
            self._pulse.state = "waiting" if idle else "generating"
            answer = self._controller.lease([lease.block for lease in self._open], self._engine.policy_version)
            if answer.is_over:
                self._open.clear()
            if answer.stop:
                return False
            if answer.groups:
                self._start(answer)
            elif not idle:
                return True
        return True

    def _has_room(self) -> bool:
        """Keep the engine's slots full, and one lease waiting behind them."""
        return self._engine.samples_in_flight < self._recipe.rollout.max_concurrent_samples

    def _start(self, answer: wire.LeaseAnswer) -> None:
        self._pulse.state = "generating"
        point("rollout.leased")
        version = answer.version if self._is_bitwise else max(answer.version, self._engine.policy_version)
        self._activate(version)
        episodes = self._runner.episodes(answer.groups)
        if answer.saved:
            episodes = self._unfinished.take_up(episodes, answer, self._engine.policy_version)
        self._submit(episodes, answer)

    def _submit(self, episodes: list[Episode], answer: wire.LeaseAnswer) -> None:
        try:
            futures = submit(episodes, self._engine.submit)
        except ValueError as error:
            if any(episode.begun is not None for episode in episodes):
                self._submit(self._unfinished.refuse(episodes, answer, str(error)), answer)
                return
            raise DataError(
                f"groups {answer.groups[0]}..{answer.groups[-1]}: {error}",
                mend="shorten the prompts, lower rollout.sampling.max_new_tokens, or use a model with a longer context",
            ) from error
        for begun in (episode.begun for episode in episodes if episode.begun is not None):
            self._digests.update(zip((span.version for span in begun.versions), begun.weights, strict=True))
        now, now_s = datetime.now(UTC), time.monotonic()
        self._open.append(OpenLease(answer.block, episodes, futures, now, now_s, answer.saved))

    # -- weights ----------------------------------------------------------------------------------------------------

    def _follow_newest(self) -> None:
        newest = self._pulse.published
        if not self._is_bitwise and newest > self._engine.policy_version and self._reach.is_near(newest):
            self._activate(newest)

    def _activate(self, version: int) -> None:
        if self._engine.policy_version == version:
            return
        began_s = time.monotonic()
        weights = self._reach.reach(version)
        version = weights.version
        prepared_s = time.monotonic() - began_s
        paused_s = self._engine.activate(weights)
        self._digests[version] = weights.weights_digest
        self._pulse.policy_version = version
        point("rollout.activated")
        self._pulse.moved()
        self._events.write(
            "weights_activated",
            version=version,
            source=self._reach.source,
            prepared_s=round(prepared_s, 4),
            paused_s=round(paused_s, 4),
        )

    # -- results ----------------------------------------------------------------------------------------------------

    def _finished(self) -> list[OpenLease]:
        """Leases whose samples are all done; waits a moment for the next one."""
        running = [future for lease in self._open for future in lease.running]
        if running:
            wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        self._pulse.samples_in_flight = self._engine.samples_in_flight
        self._pulse.set_activity(self._engine.tokens_generated)
        return [lease for lease in self._open if not lease.running]

    def _leave(self) -> None:
        """Save what is begun and commit what is done; saving comes first, for it is quick and nothing in it waits."""
        if self._is_bitwise or not self._open:
            return
        self._pulse.state = "saving"
        self._engine.close()
        for lease in self._open:
            if not lease.is_whole:
                self._unfinished.save(lease, self._digests)
        for lease in self._open:
            if lease.is_whole:
                self._commit(lease)

    def _commit(self, lease: OpenLease) -> None:
        completions = lease.completions()
        generated_s = time.monotonic() - lease.started_s
        point("rollout.generated")
        trajectories = self._runner.record(lease.episodes, completions, self._digests, lease.started, datetime.now(UTC))
        self._write(lease, trajectories, generated_s)

    def _write(self, lease: OpenLease, trajectories: list[Trajectory], generated_s: float) -> None:
        name, ref = self._patience.until_space(
            lambda: write_trajectories(
                self._layout,
                trajectories,
                incarnation=self._context.incarnation,
                worker=self._context.name,
                metadata=self._metadata,
                before_commit=self._fence.check,
                samples_per_group=self._recipe.rollout.samples_per_group,
            )
        )
        point("rollout.written")
        request = wire.CommitRequest(
            name=self._context.name,
            block=lease.block,
            groups=refs_of(trajectories, str(name), ref.digest),
            response_tokens=lease.tokens_drawn,
            generated_s=generated_s,
            errors=tuple(trajectory.error for trajectory in trajectories if trajectory.error is not None),
            episodes=len(trajectories),
        )
        accepted = self._controller.commit(request)
        point("rollout.committed")
        cached = self._engine.cached_share
        self._events.write(
            "trajectories_committed",
            path=str(name),
            block=lease.block,
            accepted=accepted,
            tokens=request.response_tokens,
            generated_s=round(generated_s, 4),
            failed=len(request.errors),
            **({} if cached is None else {"cached_share": round(cached, 4)}),
        )
        if not accepted:
            reason = "another worker's file of the same groups was committed first"
            move_to_quarantine(self._layout.trajectory(name), self._layout.quarantine, reason)
        self._unfinished.discard(lease.saved)

    def _tell_late(self, text: str) -> None:
        self._pulse.moved()
        print(text, file=sys.stderr, flush=True)

    def _tell_full(self, text: str) -> None:
        self._pulse.waits_for_space(text)
        print(text, file=sys.stderr, flush=True)
        self._events.write("waiting_for_space", error=text)
