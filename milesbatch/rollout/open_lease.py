"""A block that a worker is at work on. A value; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime

from milesbatch.engines.protocol import Completion, GenerationRequest
from milesbatch.rollout.continuing import joined
from milesbatch.rollout.episodes import Episode


@dataclass(slots=True)
class OpenLease:
    """A block whose samples are being generated. ``futures`` are of what is drawn in this incarnation."""

    block: int
    episodes: list[Episode]
    futures: list[Future[Completion]]
    started: datetime
    started_s: float
    saved: tuple[str, ...] = ()
    """Files in ``inflight/`` with what earlier incarnations began of it."""

    @property
    def groups(self) -> list[int]:
        return sorted({episode.group_id for episode in self.episodes})

    @property
    def running(self) -> list[Future[Completion]]:
        return [future for future in self.futures if not future.done()]

    @property
    def is_whole(self) -> bool:
        """Are all samples done, and none cut off? Only once nothing is running."""
        return all(future.result().finish_reason != "abort" for future in self.futures)

    @property
    def tokens_drawn(self) -> int:
        """Tokens that this incarnation drew."""
        return sum(len(future.result().tokens) for future in self.futures)

    def completions(self) -> list[Completion]:
        """The whole responses, in the order of the episodes; once nothing is running."""
        pairs = zip(self.episodes, self.futures, strict=True)
        return [joined(episode.begun, future.result()) for episode, future in pairs]


def submit(
    episodes: Sequence[Episode], engine_submit: Callable[[Sequence[GenerationRequest]], list[Future[Completion]]]
) -> list[Future[Completion]]:
    """A future for each of ``episodes``; those that an earlier incarnation finished are not generated.

    Raises:
        ValueError: the engine does not take one of the requests; none was queued.
    """
    asked = iter(engine_submit([episode.request for episode in episodes if not episode.is_finished]))
    return [_done(episode) if episode.is_finished else next(asked) for episode in episodes]


def _done(episode: Episode) -> Future[Completion]:
    assert episode.begun is not None
    future: Future[Completion] = Future()
    future.set_result(Completion((), (), "stop" if episode.begun.finish_reason == "stop" else "length"))
    return future
