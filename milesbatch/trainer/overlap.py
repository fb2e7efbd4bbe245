"""One job beside the training, and the ranks' words about it: how publishing goes on while the next step computes.

Owns the thread of a rank and the process group of its own that jobs of all ranks talk through; never decides what may overlap.
Invariant: at most one job at a time, and what it raised is raised by :meth:`InBackground.finish`, in the thread that trains.

Memory is handed over, not shared: a job's weights are copies, and what it changes is looked at after ``finish`` only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Overlap(Protocol):
    """Where a job runs."""

    def start(self, job: Callable[[], None]) -> None:
        """Begin ``job``; the one before must be finished."""

    def finish(self) -> None:
        """Return when no job runs; raises what it raised."""

    @property
    def is_idle(self) -> bool:
        """No job runs, whatever became of the last one."""


class InBackground:
    """Jobs in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        assert self._job is None, "finish() comes before the next start()"
        self._job = self._thread.submit(job)

    def finish(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @property
    def is_idle(self) -> bool:
        return self._job is None or self._job.done()


class RankTeam:
    """The trainer's ranks, as :class:`milesbatch.weights.team.Team`. Construction is collective."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s`` bounds how long a rank waits for the others, of which one may be waiting for space."""
        # Jobs talk from a thread: on the training group their words would mix with those of a train step and hang both.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank, self._size = dist.get_rank(), dist.get_world_size()

    def all_of(self, value: T) -> list[T]:
        if self._size == 1:
            return [value]
        found: list[T] = [value] * self._size
        dist.all_gather_object(found, value, group=self._group)
        return found
