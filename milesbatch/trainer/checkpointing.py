"""Consistent checkpoints, written in the background; committed by the manifest, which is written last.

Order and crash states:

1. every rank's state is copied to memory (the only stall) and written by a background thread under
   ``checkpoints/STEP/shards.iINCARNATION/``. Killed here: a directory without a manifest, which nobody takes for a checkpoint;
   the next attempt at the same step removes and writes it again.
2. rank 0 makes the shards durable, digests them, checks the fence, and creates ``manifest.json`` exclusively: the commit.
3. only then older checkpoints are deleted, manifest first. Killed midway: one more checkpoint than asked for, or a directory
   without a manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from milesbatch.errors import CorruptArtefactError
from milesbatch.faults.points import point
from milesbatch.records import CheckpointManifest, GroupRef
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    file_ref,
    make_directory,
    move_to_quarantine,
    read_optional,
    remove_tree,
    sync_tree,
    verify_file,
)
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import Patience
from milesbatch.store.survey import Seals, read_incarnations


class Saver(Protocol):
    """Writes a state in the background, and reads it (:class:`milesbatch.backends.distributed_checkpoint.AsyncSaver`)."""

    def start(self, state_dict: Mapping[str, Any], directory: Any) -> None: ...
    @property
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def load(self, state: dict[str, Any], directory: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What rank 0 puts into the manifest beside the shards."""

    step: int
    weights_digest: str
    stream_position: int
    fates_since: int
    fates: dict[str, str]
    pending: tuple[GroupRef, ...]
    divergences: tuple[int, ...]


class Checkpointer:
    """Takes checkpoints on all ranks; commits them on rank 0."""

    def __init__(
        self, layout: RunLayout, fence: Fence, saver: Saver, rank: int, world_size: int, keep: int, patience: Patience
    ) -> None:
        self._layout = layout
        self._fence = fence
        self._saver = saver
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._patience = patience
        self._running: CheckpointFacts | None = None

    def prepare(self, step: int) -> None:
        """Rank 0, before all ranks call :meth:`start`: an empty directory for the shards."""
        shards = self._layout.checkpoint_shards(step, self._fence.incarnation)
        if shards.exists():
            remove_tree(shards)
        make_directory(shards)

    def start(self, state_dict: Mapping[str, Any], facts: CheckpointFacts) -> None:
        """All ranks: copy the state and begin to write. The one before must have been committed (:meth:`finish`)."""
        assert self._running is None
        self._saver.start(state_dict, self._layout.checkpoint_shards(facts.step, self._fence.incarnation))
        self._running = facts

    def finish(self) -> int | None:
        """All ranks: wait for the running checkpoint and (rank 0) commit it; returns its step, None when none was running.

        Raises:
            FencedError: a newer incarnation has taken over; nothing was committed.
            StorageFullError: on all ranks, no space for the shards; the checkpoint before stays, and another may be started.
            StorageError: the shards could not be written; the checkpoint before stays.
        """
        facts, self._running = self._running, None
        if facts is None:
            return None
        self._saver.wait()
        point("trainer.checkpoint_written")
        if self._rank == 0:
            self._patience.until_space(lambda: self._commit(facts))
        return facts.step

    def restore(self, step: int, state: dict[str, Any]) -> CheckpointManifest:
        """All ranks: fill the tensors of ``state`` in place from the committed checkpoint of ``step``; returns its manifest.

        Raises:
            CorruptArtefactError: the manifest or a shard is missing or damaged.
            StorageError: the shards cannot be read.
        """
        manifest = read_checkpoint(self._layout, step)
        self._saver.load(state, self._layout.checkpoint_shards(step, manifest.incarnation))
        return manifest

    def has(self, step: int) -> bool:
        """Rank 0: is there a committed checkpoint of ``step`` that counts? One that does not is moved to quarantine."""
        path = self._layout.checkpoint_manifest(step)
        if not path.exists():
            return False
        if self._counts(step):
            return True
        move_to_quarantine(path, self._layout.quarantine, "it is damaged, or was written after it had been sealed out")
        return False

    @property
    def is_written(self) -> bool:
        """Rank 0: the running checkpoint waits only for its commit."""
        return self._running is not None and self._saver.is_done

    def _commit(self, facts: CheckpointFacts) -> None:
        directory = self._layout.checkpoint(facts.step)
        shards = self._layout.checkpoint_shards(facts.step, self._fence.incarnation)
        sync_tree(shards)
        files = [p for p in sorted(shards.rglob("*")) if p.is_file()]
        manifest = CheckpointManifest(
            step=facts.step,
            incarnation=self._fence.incarnation,
            policy_version=facts.step,
            weights_digest=facts.weights_digest,
            world_size=self._world_size,
            files=tuple(file_ref(path, name=str(path.relative_to(directory))) for path in files),
            stream_position=facts.stream_position,
            fates_since=facts.fates_since,
            fates=facts.fates,
            pending=facts.pending,
            divergences=facts.divergences,
            created_at=utc_now(),
        )
        path = self._layout.checkpoint_manifest(facts.step)
        try:
            create_exclusively(path, manifest.to_bytes(), self._fence.check)
        except AlreadyExistsError:
            if self._counts(facts.step):
                raise
            reason = f"another incarnation wrote it after incarnation {self._fence.incarnation} had sealed the run"
            move_to_quarantine(path, self._layout.quarantine, reason)
            create_exclusively(path, manifest.to_bytes(), self._fence.check)
        self._retire(facts.step)

    def _counts(self, step: int) -> bool:
        """Is the committed checkpoint one that every later incarnation's seal covers?"""
        path = self._layout.checkpoint_manifest(step)
        try:
            manifest = CheckpointManifest.from_bytes(path.read_bytes(), str(path))
        except CorruptArtefactError:
            return False
        return Seals(read_incarnations(self._layout)).accept_checkpoint(manifest)

    def _retire(self, newest: int) -> None:
        """Only checkpoints that count are counted, so that a zombie's never takes the place of a good one."""
        committed = [s for s in committed_checkpoints(self._layout) if s <= newest and self._counts(s)]
        for step in committed[: -self._keep]:
            remove_tree(self._layout.checkpoint(step))


def committed_checkpoints(layout: RunLayout) -> list[int]:
    """Steps with a checkpoint manifest, ascending; whether it counts and is whole is not looked at."""
    steps = []
    for path in layout.checkpoints.glob("*/manifest.json"):
        if path.parent.name.isdigit():
            steps.append(int(path.parent.name))
    return sorted(steps)


def read_checkpoint(layout: RunLayout, step: int) -> CheckpointManifest:
    """The manifest of a checkpoint, after its shards were verified.

    Raises:
        CorruptArtefactError: the manifest or a shard is missing or damaged.
    """
    path = layout.checkpoint_manifest(step)
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing", mend="run `milesbatch audit` on the run")
    manifest = CheckpointManifest.from_bytes(data, str(path))
    for ref in manifest.files:
        verify_file(layout.checkpoint(step) / ref.path, ref)
    return manifest
