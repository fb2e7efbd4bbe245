"""Evaluates one policy version: weights, generation, judgement, commit.

    published version ──> follower (proven weights) ──> engine ──> episodes of the rollout role ──> commit

Owns the order. It generates with the engine and judges with the episodes of the rollout role; there is no second way.
Never touches what training reads or writes. Invariant: what has a record is not generated again. The page behind it is
``docs/evaluation.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from milesbatch.engines.protocol import Completion, RolloutEngine
from milesbatch.errors import DataError, StoppedToContinue, StorageError
from milesbatch.evaluation.asking import Asking
from milesbatch.evaluation.reader import read_evaluation
from milesbatch.evaluation.writer import commit_evaluation, finish_evaluation
from milesbatch.faults.points import point
from milesbatch.records import EvaluationRecord
from milesbatch.rollout.episodes import EpisodeRunner
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.schema import FileMetadata

if TYPE_CHECKING:
    from milesbatch.rollout.staged import StagedFollower
    from milesbatch.weights.follower import Follower

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Generating:
    """What generation takes: made when the first version needs it, for it imports torch and loads a model."""

    engine: RolloutEngine
    runner: EpisodeRunner


@dataclass(slots=True)
class Evaluator:
    """Evaluates policy versions of one run with one set of prompts. Not for several threads."""

    layout: RunLayout
    asking: Asking
    follower: Follower | StagedFollower
    metadata: FileMetadata
    prepare: Callable[[], Generating]
    should_stop: Callable[[], bool] = lambda: False
    tell_progress: Callable[[int], None] = lambda tokens: None
    """Called with the tokens generated so far, several times a second."""
    _generating: Generating | None = None

    def published_digest(self, version: int) -> str | None:
        """Weights digest of ``version``; None while it is not published.

        Raises:
            CorruptArtefactError: its manifest is damaged.
        """
        return self.follower.published_digest(version)

    def known(self, version: int, weights_digest: str) -> EvaluationRecord | None:
        """The record of an evaluation that is done; it is finished here when its evaluator was killed just before.

        Raises:
            CorruptArtefactError: the record is damaged.
            StorageError: it cannot be read, or not be finished.
        """
        subject = self.asking.of(version, weights_digest)
        path = self.layout.evaluation_record(version, subject.tag)
        if read_optional(path) is not None:
            return read_evaluation(path)
        return finish_evaluation(self.layout, subject)

    def evaluate(self, version: int, weights_digest: str) -> EvaluationRecord:
        """Ask all prompts, and commit the answers. The version must be held against retirement.

        Raises:
            CorruptArtefactError: the weights cannot be rebuilt, or were retired (``RetiredError``).
            DataError: a prompt does not fit into the model.
            StoppedToContinue: told to stop; nothing was written.
            StorageError: weights cannot be read, or answers not be written; nothing counts.
        """
        if self._generating is None:  # before the weights: what ends with a server's guard is then all there is
            self._generating = self.prepare()
        made = self._generating
        weights = self.follower.advance_to(version)
        if weights.weights_digest != weights_digest:
            raise StorageError(
                f"policy version {version} was published again with other weights meanwhile",
                mend="nothing: it is evaluated at the next look",
            )
        made.engine.activate(weights)
        started = datetime.now(UTC)
        episodes = made.runner.episodes(range(len(self.asking.held_out)))
        try:
            futures = made.engine.submit([episode.request for episode in episodes])
        except ValueError as error:
            raise DataError(
                f"the evaluation's prompts cannot all be asked: {error}",
                mend="shorten the prompts, lower evaluation.max_new_tokens, or use a model with a longer context",
            ) from error
        completions = self._await(futures, made.engine)
        point("evaluation.generated")
        found = made.runner.record(episodes, completions, {version: weights_digest}, started, datetime.now(UTC))
        return commit_evaluation(self.layout, self.asking.of(version, weights_digest), found, self.metadata)

    def _await(self, futures: Sequence[Future[Completion]], engine: RolloutEngine) -> list[Completion]:
        running = set(futures)
        while running:
            _, running = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            self.tell_progress(engine.tokens_generated)
            if self.should_stop():
                raise StoppedToContinue("told to stop in the middle of an evaluation", mend="the next start makes it")
        return [future.result() for future in futures]
