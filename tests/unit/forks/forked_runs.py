"""Forks of a sound run as far as a test needs them: made, committed, grown by some steps."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, BinaryIO

from audit_runs import generate, read
from builders import (
    GROUPS_PER_LEASE,
    GROUPS_PER_STEP,
    IMPATIENT,
    FileSaver,
    commit_batch,
    make_facts,
    make_recipe,
    past_incarnation,
    publish,
)

from milesbatch.forks.make import Fork, fork
from milesbatch.recipe.models import Recipe
from milesbatch.records import ForkedFrom, RunRecord, WeightsManifest
from milesbatch.store.create import commit_run, lay_out
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations
from milesbatch.store.run import read_run_record
from milesbatch.trainer.checkpointing import Checkpointer

MORE = 12
"""Steps of a fork's recipe."""


def fork_recipe(**changes: Any) -> Recipe:
    return make_recipe(**{"steps": MORE, **changes})


def make_fork(
    parent: RunLayout, target: Path, step: int | None = None, said: list[str] | None = None, **changes: Any
) -> ForkedFrom:
    asked = Fork(parent, str(parent.root), RunLayout(target), step)
    return fork(asked, fork_recipe(**changes), (said if said is not None else []).append)


def begin_run(layout: RunLayout, **changes: Any) -> RunRecord:
    """What ``run`` makes of a fork, without a model that needs torch."""
    parent = read(RunRecord, layout.parent_run_record)
    lay_out(layout, fork_recipe(**changes))
    return commit_run(layout, fork_recipe(**changes), parent.fingerprints)


def grow_fork(layout: RunLayout, steps: range) -> None:
    """One incarnation makes ``steps``, the last of them with a checkpoint."""
    incarnation = past_incarnation(layout)
    record = read_run_record(layout)
    assert record is not None and record.forked_from is not None
    begin = record.forked_from
    for step in steps:
        first = begin.first_group + (step - 1 - begin.step) * GROUPS_PER_STEP
        version = max(begin.first_version, step - 2)
        refs = [
            ref
            for block in range(first, first + GROUPS_PER_STEP, GROUPS_PER_LEASE)
            for ref in generate(
                layout, range(block, block + GROUPS_PER_LEASE), version=version, incarnation=incarnation
            )
        ]
        commit_batch(layout, step, refs, incarnation)
        publish(layout, [step], incarnation)
    step = steps[-1]
    digest = read(WeightsManifest, layout.weights_manifest(step)).weights_digest
    facts = make_facts(step, weights_digest=digest, fates_since=step)
    checkpointer = Checkpointer(layout, Fence(layout, incarnation), FileSaver(), 0, 1, 2, IMPATIENT, None, begin.step)
    checkpointer.prepare(step)
    checkpointer.start({"model.distcp": b"state %d" % step * 50}, facts)
    assert checkpointer.finish() == step


def spoil(path: Path) -> None:
    """Other bytes under this name only: a fork shares its files with the parent."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.unlink()
    path.write_bytes(data)


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.parent.name != "holds"
    }


class KilledError(BaseException):
    """The process ended here."""


class Mortal(Operations):
    """Operations of a process that is killed before its operation number ``at``, and does nothing any more after that."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _live(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def create(self, path: Path) -> BinaryIO:
        self._live()
        return super().create(path)

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        self._live()
        super().sync_file(path, stream)

    def sync_directory(self, path: Path) -> None:
        self._live()
        super().sync_directory(path)

    def link(self, source: Path, target: Path) -> None:
        self._live()
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        self._live()
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._live()
        super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        self._live()
        super().remove_directory(path)


class WithoutLinks(Operations):
    """Another filesystem: names cannot be shared between the two directories."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def link(self, source: Path, target: Path) -> None:
        if source.is_relative_to(self._source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        super().link(source, target)


class Full(Operations):
    """No space is left for new files."""

    def __init__(self, after: int) -> None:
        self.left = after

    def create(self, path: Path) -> BinaryIO:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)
