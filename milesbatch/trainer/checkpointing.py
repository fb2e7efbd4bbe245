"""Consistent checkpoints, written in the background; committed by the manifest, which is written last.

Order and crash states:

1. every rank's state is copied to memory, before the next update of the weights, and written under
   ``checkpoints/STEP/shards.iINCARNATION/``; then rank 0 makes all shards durable and digests them. All that in the background.
   Killed here: a directory without a manifest, which nobody takes for a checkpoint; the next attempt at the same step removes
   and writes it again.
2. rank 0 checks the fence, and creates ``manifest.json`` exclusively: the commit.
3. only then older checkpoints are deleted, in the background, manifest first. Killed midway: one more checkpoint than asked
   for, or a directory without a manifest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from milesbatch.decisions.retention import checkpoints_to_retire
from milesbatch.errors import CorruptArtefactError
from milesbatch.faults.points import point
from milesbatch.records import CheckpointManifest, FileRef, GroupRef
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import (
    AlreadyExistsError,
    create_exclusively,
    file_ref,
    is_residue,
    make_directory,
    read_optional,
    remove_tree,
    sync_tree,
    verify_files,
)
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.patience import Patience
from milesbatch.store.removal import take_away
from milesbatch.store.sight import AT_ONCE, Sight, refresh
from milesbatch.store.survey import Seals, read_incarnations


class Saver(Protocol):
    """Writes a state in the background, and reads it (:class:`milesbatch.backends.distributed_checkpoint.AsyncSaver`)."""

    def start(self, state_dict: Mapping[str, Any], directory: Path, afterwards: Callable[[], None] | None) -> None: ...
    def await_copy(self) -> None: ...
    def later(self, action: Callable[[], None]) -> None: ...
    @property
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def load(self, state: dict[str, Any], directory: Path) -> None: ...


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
        self,
        layout: RunLayout,
        fence: Fence,
        saver: Saver,
        rank: int,
        world_size: int,
        keep: int,
        patience: Patience,
        keep_every: int | None = None,
        origin_step: int = 0,
    ) -> None:
        self._layout = layout
        self._fence = fence
        self._saver = saver
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._keep_every = keep_every
        self._origin_step = origin_step
        self._patience = patience
        self._running: CheckpointFacts | None = None
        self._files: tuple[FileRef, ...] = ()

    def prepare(self, step: int) -> None:
        """Rank 0, before all ranks call :meth:`start`: an empty directory for the shards."""
        shards = self._layout.checkpoint_shards(step, self._fence.incarnation)
        if shards.exists():
            refresh(shards)  # an earlier attempt, on another host, may have written more than was seen
            remove_tree(shards)
        make_directory(shards)

    def start(self, state_dict: Mapping[str, Any], facts: CheckpointFacts) -> None:
        """All ranks: begin to copy the state and to write it. The one before must have been committed (:meth:`finish`).

        The state must not change before :meth:`await_copy` has returned.
        """
        assert self._running is None
        shards = self._layout.checkpoint_shards(facts.step, self._fence.incarnation)
        settle = functools.partial(self._settle, shards) if self._rank == 0 else None
        self._saver.start(state_dict, shards, settle)
        self._running = facts

    def await_copy(self) -> None:
        """Return when the state may change: at once when none is being copied."""
        self._saver.await_copy()

    def finish(self, settled: Callable[[CheckpointFacts], CheckpointFacts] = lambda facts: facts) -> int | None:
        """All ranks: wait for the running checkpoint and (rank 0) commit it; returns its step, None when none was running.

        ``settled`` completes the facts on rank 0 by what was not known at the start; it raises what ends the trainer.

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
            complete = settled(facts)
            self._patience.until_space(lambda: self._commit(complete))
            self.later(functools.partial(self._retire, facts.step))
        return facts.step

    def later(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the background; what goes wrong in it is raised by :meth:`finish` or :meth:`close`."""
        self._saver.later(action)

    def close(self) -> None:
        """All ranks, at the end: wait for what still runs in the background.

        Raises:
            FencedError, StorageError: from an action that was to be run later.
        """
        self._saver.wait()

    def restore(self, step: int, state: dict[str, Any], sight: Sight = AT_ONCE) -> CheckpointManifest:
        """All ranks: fill the tensors of ``state`` in place from the committed checkpoint of ``step``; returns its manifest.

        ``sight``: how long a rank on another host than the writer's looks for it. A fork may have more ranks than its parent:
        those that had no predecessor keep the random state that they have (nothing is drawn from it in training).

        Raises:
            CorruptArtefactError: the manifest or a shard is missing or damaged.
            StorageError: the shards cannot be read.
        """
        manifest = sight.until_seen(lambda: read_checkpoint(self._layout, step))
        saved = {key: value for key, value in state.items() if self._rank < manifest.world_size or not is_random(key)}
        self._saver.load(saved, self._layout.checkpoint_shards(step, manifest.incarnation))
        return manifest

    def has(self, step: int, sight: Sight = AT_ONCE) -> bool:
        """Rank 0: is there a committed checkpoint of ``step`` that counts? One that does not is moved to quarantine."""
        path = self._layout.checkpoint_manifest(step)
        if sight.wait_s:
            refresh(path.parent)  # its shards must not be written again because this host does not see it yet
        if not path.exists():
            return False
        if _counts(self._layout, step, sight):
            return True
        reason = "it is damaged, or was written after it had been sealed out"
        take_away(self._layout, self._fence.incarnation, path, reason)
        return False

    @property
    def is_written(self) -> bool:
        """Rank 0: the running checkpoint waits only for its commit."""
        return self._running is not None and self._saver.is_done

    def _settle(self, shards: Path) -> None:
        """Rank 0, in the background, once the shards of all ranks are written: make them durable and digest them."""

        def settle() -> tuple[FileRef, ...]:
            sync_tree(shards)
            files = [path for path in sorted(shards.rglob("*")) if path.is_file() and not is_residue(path.name)]
            return tuple(file_ref(path, name=str(path.relative_to(shards.parent))) for path in files)

        self._files = self._patience.until_space(settle)

    def _commit(self, facts: CheckpointFacts) -> None:
        manifest = CheckpointManifest(
            step=facts.step,
            incarnation=self._fence.incarnation,
            policy_version=facts.step,
            weights_digest=facts.weights_digest,
            world_size=self._world_size,
            files=self._files,
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
            if _counts(self._layout, facts.step):
                raise
            reason = f"another incarnation wrote it after incarnation {self._fence.incarnation} had sealed the run"
            take_away(self._layout, self._fence.incarnation, path, reason)
            create_exclusively(path, manifest.to_bytes(), self._fence.check)

    def _retire(self, newest: int) -> None:
        """Only checkpoints that count are counted, so that a zombie's never takes the place of a good one."""
        committed = counting_checkpoints(self._layout, newest)
        for step in checkpoints_to_retire(committed, self._keep, self._keep_every, self._origin_step):
            self._fence.check()  # what a newer incarnation has sealed is not this one's to delete
            remove_tree(self._layout.checkpoint(step))


def is_random(key: str) -> bool:
    """Is this entry of a trainer's state one rank's random state, which only a rank of the same number can take over?"""
    return key.startswith("random/")


def committed_checkpoints(layout: RunLayout) -> list[int]:
    """Steps with a checkpoint manifest, ascending; whether it counts and is whole is not looked at."""
    steps = []
    for path in layout.checkpoints.glob("*/manifest.json"):
        if path.parent.name.isdigit():
            steps.append(int(path.parent.name))
    return sorted(steps)


def counting_checkpoints(layout: RunLayout, newest: int) -> list[int]:
    """Steps up to ``newest`` with a committed checkpoint that counts, ascending; whether it is whole is not looked at."""
    return [step for step in committed_checkpoints(layout) if step <= newest and _counts(layout, step)]


def _counts(layout: RunLayout, step: int, sight: Sight = AT_ONCE) -> bool:
    """Is the committed checkpoint one that every later incarnation's seal covers?"""
    try:
        manifest = sight.until_seen(lambda: _read_manifest(layout, step))
    except CorruptArtefactError:
        return False  # damaged, or retired and still in an old listing
    return Seals(read_incarnations(layout)).accept_checkpoint(manifest)


def read_checkpoint(layout: RunLayout, step: int) -> CheckpointManifest:
    """The manifest of a checkpoint, after its shards were verified.

    Raises:
        CorruptArtefactError: the manifest or a shard is missing or damaged.
    """
    manifest = _read_manifest(layout, step)
    verify_files(layout.checkpoint(step), manifest.files)
    return manifest


def _read_manifest(layout: RunLayout, step: int) -> CheckpointManifest:
    path = layout.checkpoint_manifest(step)
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing", mend="run `milesbatch audit` on the run", unseen=path)
    return CheckpointManifest.from_bytes(data, str(path))
