"""The conformance suite over a directory, and what only a directory can do wrong."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from against_model import check_against_model
from conformance import Conformance, Opener, in_chunks

from milesbatch.errors import StorageError, StorageFullError
from milesbatch.store.operations import Operations, installed
from milesbatch.store.port import OutcomeUnknownError
from milesbatch.store.posix_store import PosixStore


@dataclass
class Broken(Operations):
    """Operations with the habits of a network filesystem; counts what went wrong."""

    number: int = errno.ETIMEDOUT
    link_first: bool = False
    """Carry the link out, and then report an error."""
    times: int = 1_000_000
    failing: tuple[str, ...] = ("link",)
    fired: int = 0
    removed: list[str] = field(default_factory=list)

    def _fail(self, operation: str, path: Path) -> None:
        if operation in self.failing and self.fired < self.times:
            self.fired += 1
            raise OSError(self.number, os.strerror(self.number), str(path))

    def link(self, source: Path, target: Path) -> None:
        if self.link_first:
            super().link(source, target)
        self._fail("link", target)
        if not self.link_first:
            super().link(source, target)

    def sync_directory(self, path: Path) -> None:
        self._fail("sync_directory", path)
        super().sync_directory(path)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.removed.append(str(path))


@dataclass
class Directory:
    root: Path

    @property
    def open(self) -> Opener:
        return partial(PosixStore, self.root)

    @contextlib.contextmanager
    def lost_reply(self) -> Iterator[Broken]:
        broken = Broken(link_first=True, times=1)
        with installed(broken):
            yield broken

    @contextlib.contextmanager
    def no_commit(self) -> Iterator[Broken]:
        broken = Broken()
        with installed(broken):
            yield broken

    @contextlib.contextmanager
    def removals(self) -> Iterator[list[str]]:
        broken, keys = Broken(times=0), []
        with installed(broken):
            yield keys
        keys += [Path(path).relative_to(self.root).as_posix() for path in broken.removed]

    def damage(self, key: str, data: bytes) -> None:
        (self.root / key).write_bytes(data)

    def unfinished(self) -> list[str]:
        return sorted(str(path) for path in self.root.rglob(".tmp-*"))


@pytest.fixture
def place(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "run")


class TestPosix(Conformance):
    """All of the suite."""


def test_random_operations_against_a_model(tmp_path: Path) -> None:
    count = 0

    def new_place() -> Opener:
        nonlocal count
        count += 1
        return partial(PosixStore, tmp_path / str(count))

    assert check_against_model(new_place, examples=20, steps=20) > 200


def test_an_unknown_end_is_reported_as_unknown(place: Directory) -> None:
    """The name is there, but that it will stay is not known: the directory cannot be synced."""
    store = place.open()
    store.create_exclusively("d/first", b"x")
    broken = Broken(number=errno.EIO, failing=("sync_directory",))
    with installed(broken), pytest.raises(OutcomeUnknownError, match=r"d/a was committed is not known.*Input/output"):
        store.create_exclusively("d/a", b"mine")
    assert broken.fired == 2
    store.create_exclusively("d/a", b"mine")
    assert store.read("d/a") == b"mine"


def test_one_failed_sync_is_made_good(place: Directory) -> None:
    store = place.open()
    store.create_exclusively("d/first", b"x")
    with installed(Broken(number=errno.EIO, failing=("sync_directory",), times=1)):
        store.create_exclusively("d/a", b"mine")
    assert store.read("d/a") == b"mine"


def test_a_full_disk_is_told_as_one(place: Directory) -> None:
    store = place.open()
    with installed(Broken(number=errno.ENOSPC)), pytest.raises(StorageFullError, match="no space"):
        store.publish("weights", "a.bin", in_chunks(b"x" * 100))
    assert store.list_keys() == [] and place.unfinished() == []


def test_an_error_is_never_taken_for_absence(place: Directory) -> None:
    """Neither by exists() nor by a listing."""
    store = place.open()
    store.create_exclusively("d/a", b"x")
    loop = place.root / "loop"
    loop.symlink_to("loop")
    for ask in (lambda: store.exists("loop/a"), lambda: store.list_keys("loop"), lambda: store.read("loop/a")):
        with pytest.raises(StorageError, match="loop"):
            ask()
