"""Unfinished episodes across incarnations (relaxed mode): what a stop interrupts is saved, and what was saved is continued.

    told to stop ──> save() what is begun of each block ─ ─ next incarnation ─ ─> take_up() before a block is generated
                                                                                   discard() once it is committed

Owns: looking at the files that a lease names, saying what became of them, and deleting those that are done with. Never: the
judgement over a sample (``rollout/continuing.py``), the engine, or the files' format (``trajectories/inflight_*.py``, where
the crash states are). Invariant: losing a file, or all of them, costs time only; and saving never waits, for the process is
about to be ended. The pages behind it are ``docs/protocol.md`` and ``docs/format-inflight.md``.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from milesbatch.decisions.batching import BatchRule
from milesbatch.errors import CorruptArtefactError, FormatVersionError, StorageError
from milesbatch.faults.points import point
from milesbatch.rollout.continuing import Conditions, from_the_start, kept, resumed, why_not
from milesbatch.rollout.episodes import Episode, Recorder
from milesbatch.rollout.open_lease import OpenLease
from milesbatch.store.durable import move_to_quarantine, remove_file
from milesbatch.store.events import EventLog
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import Sight
from milesbatch.trajectories.inflight_reader import InflightFile, read_inflight
from milesbatch.trajectories.inflight_schema import InflightMetadata
from milesbatch.trajectories.inflight_writer import write_inflight
from milesbatch.wire import messages as wire


@dataclass(frozen=True, slots=True)
class UnfinishedEpisodes:
    """One worker's dealings with ``inflight/``."""

    layout: RunLayout
    worker: Recorder
    metadata: InflightMetadata
    rule: BatchRule
    digest_of: Callable[[int], str | None]
    """Weights digest of a published policy version; None when none of that number counts."""
    events: EventLog
    sight: Sight
    """How long a file is looked for that a shared filesystem shows late: a few seconds, it is not worth more."""

    # -- continuing -------------------------------------------------------------------------------------------------

    def take_up(self, episodes: Sequence[Episode], answer: wire.LeaseAnswer, newest: int) -> list[Episode]:
        """``episodes`` of a lease; those that were begun, and may go on under policy version ``newest``, go on.

        Looks at the files that ``answer`` names, one after the other, until one is of use. Damaged ones go to quarantine.
        """
        conditions = Conditions(
            incarnation=self.worker.incarnation,
            step=answer.step,
            oldest=self.rule.oldest_for(answer.step),
            newest=newest,
            digest_of=cache(self._published),
        )
        for name in answer.saved:
            file = self._read(self.layout.unfinished(name))
            taken = list(episodes) if file is None else self._go_on(episodes, file, conditions)
            begun = [episode.begun for episode in taken if episode.begun is not None]
            if begun:
                finished = sum(sample.finish_reason is not None for sample in begun)
                self.events.write(
                    "episodes_continued",
                    path=name,
                    block=answer.block,
                    unfinished=len(begun) - finished,
                    finished=finished,
                    tokens=sum(len(sample.tokens) for sample in begun),
                )
                return taken
        return list(episodes)

    def refuse(self, episodes: Sequence[Episode], answer: wire.LeaseAnswer, reason: str) -> list[Episode]:
        """``episodes`` from the start: the engine does not take what was begun of them, as ``reason`` says."""
        self._ignore(" ".join(answer.saved), reason, sum(episode.begun is not None for episode in episodes))
        return [from_the_start(episode) for episode in episodes]

    def _read(self, path: Path) -> InflightFile | None:
        """A file of this run; None, and said why, when it is of no use."""
        try:
            file = self.sight.until_seen(lambda: read_inflight(path))
        except CorruptArtefactError as error:
            self._ignore(path.name, error.what)
            if path.exists():
                with contextlib.suppress(StorageError):  # where it stays, it is ignored again
                    move_to_quarantine(path, self.layout.quarantine, error.what)
            return None
        except (FormatVersionError, StorageError) as error:
            self._ignore(path.name, error.what)
            return None
        if file.metadata != self.metadata:
            self._ignore(path.name, f"it is of run {file.metadata.run_id}, or of another tokenizer", len(file.samples))
            return None
        return file

    def _go_on(self, episodes: Sequence[Episode], file: InflightFile, conditions: Conditions) -> list[Episode]:
        found = {(sample.group_id, sample.sample_index): sample for sample in file.samples}
        reasons: Counter[str] = Counter()
        taken = []
        for episode in episodes:
            begun = found.get((episode.group_id, episode.sample_index))
            reason = None if begun is None else why_not(begun, episode, conditions)
            if reason is not None:
                reasons[reason] += 1
            taken.append(episode if begun is None or reason is not None else resumed(episode, begun))
        for reason, count in reasons.items():
            self._ignore(str(file.name), reason, count)
        return taken

    def _published(self, version: int) -> str | None:
        try:
            return self.digest_of(version)
        except CorruptArtefactError:  # the manifest; whoever needs the weights themselves reports it
            return None

    def _ignore(self, path: str, reason: str, episodes: int = 0) -> None:
        print(f"not continued from {path}: {reason}", file=sys.stderr, flush=True)
        self.events.write("inflight_ignored", path=path, reason=reason, episodes=episodes)

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, lease: OpenLease, weights: Mapping[int, str]) -> None:
        """Save what is begun of a block whose samples were cut off; ``weights`` maps policy versions to their digests.

        What cannot be saved, for want of space or whatever the filesystem says, is told and let go.

        Raises:
            FencedError: a newer incarnation has taken over.
        """
        if not lease.tokens_drawn:
            return  # nothing was begun, or a file with all of it is there
        pairs = zip(lease.episodes, lease.completions(), strict=True)
        incarnation = self.worker.incarnation
        found = [kept(episode, whole, weights, lease.started, incarnation) for episode, whole in pairs]
        samples = [sample for sample in found if sample is not None]
        figures = {
            "block": lease.block,
            "unfinished": sum(sample.finish_reason is None for sample in samples),
            "finished": sum(sample.finish_reason is not None for sample in samples),
            "tokens": sum(len(sample.tokens) for sample in samples),
        }
        try:
            name, _ = write_inflight(
                self.layout,
                samples,
                groups=lease.groups,
                incarnation=incarnation,
                worker=self.worker.worker,
                metadata=self.metadata,
                before_commit=Fence(self.layout, incarnation).check,
            )
        except StorageError as error:
            print(f"unfinished episodes are not saved: {error.what}", file=sys.stderr, flush=True)
            self.events.write("episodes_not_saved", error=error.what, **figures)
            return
        point("rollout.saved")
        self.events.write("episodes_saved", path=str(name), **figures)
        self.discard(lease.saved)

    def discard(self, names: Sequence[str]) -> None:
        """Delete files of a block that is committed, or saved again with all that is in them."""
        for name in names:
            with contextlib.suppress(StorageError):  # what stays costs space until the next take-over
                remove_file(self.layout.unfinished(name))
