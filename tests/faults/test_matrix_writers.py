"""Every writer, every operation of it, every way in which a disk refuses: a small run in one process, disturbed once.

What trains and generates is the cheap stand-in of the crash tests; who writes is the real code. Whatever fails, and wherever:
no other error than one of storage that names the path, and in the end the weights and fates of a run that was not disturbed.
"""

from __future__ import annotations

import errno
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import crash_life
import pytest
from crash_life import live
from crash_log import QuickOperations
from crash_scene import SlowSaver, crash_recipe
from crash_search import Ending, ending_of, undisturbed

from milesbatch.audit.prove import audit_run
from milesbatch.errors import StorageError, StorageFullError, StorageReadOnlyError
from milesbatch.store.durable import AlreadyExistsError
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed

FOR_EVER = 10**9
SOME = 41
"""In the fast tests, one mutation of so many."""


class Refusing(Operations):
    """Mutations from the ``first`` on fail with ``number``, ``times`` of them. Syncs nothing: the machine stays up."""

    def __init__(self, first: int, number: int = 0, times: int = 0) -> None:
        self.passed = 0
        self.refused: list[str] = []
        self._refuse = range(first, first + times)
        self._number = number

    def create(self, path: Path) -> BinaryIO:
        self._pass("create", path)
        return cast(BinaryIO, io.BufferedWriter(_Watched(path, self)))

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        stream.flush()
        self._pass("sync_file", path)

    def sync_directory(self, path: Path) -> None:
        self._pass("sync_directory", path)

    def link(self, source: Path, target: Path) -> None:
        self._pass("link", target)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._pass("rename", source)
        super().rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        self._pass("replace", target)
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._pass("unlink", path)
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._pass("make_directory", path)
        super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        self._pass("remove_directory", path)
        super().remove_directory(path)

    def _pass(self, operation: str, path: Path) -> None:
        self.passed += 1
        if self.passed in self._refuse:
            self.refused.append(f"{operation} {path}")
            raise OSError(self._number, os.strerror(self._number), str(path))


class _Watched(io.FileIO):
    def __init__(self, path: Path, operations: Refusing) -> None:
        super().__init__(path, "x")
        self._path, self._operations = path, operations

    def write(self, data: Any) -> int:
        self._operations._pass("write", self._path)
        return super().write(data)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def mutations(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many mutations a whole run has."""
    operations = Refusing(FOR_EVER)
    with installed(operations):
        live(RunLayout(tmp_path_factory.mktemp("counted") / "run"), crash_recipe())
    assert operations.passed > 300
    return operations.passed


class BackgroundSaver(SlowSaver):
    """As the real one, which works in the background: what goes wrong there is told by ``wait``, and only there."""

    def __init__(self) -> None:
        super().__init__()
        self._error: StorageError | None = None

    def await_copy(self) -> None:
        self._try(super().await_copy)

    def later(self, action: Callable[[], None]) -> None:
        self._try(action)

    @property
    def is_done(self) -> bool:
        self._try(super().wait)
        return True

    def wait(self) -> None:
        self._try(super().wait)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, action: Callable[[], None]) -> None:
        if self._error is None:
            try:
                action()
            except StorageError as error:
                self._error = error
                self._live, self._waiting, self._afterwards = {}, [], None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(crash_life, "SlowSaver", BackgroundSaver)


def disturb(root: Path, first: int, number: int, times: int) -> tuple[RunLayout, StorageError | None, list[str]]:
    """A run whose mutation ``first`` is refused; how its process ended, and what was refused."""
    layout = RunLayout(root / f"at-{first}" / "run")
    operations = Refusing(first, number, times)
    try:
        with installed(operations):
            live(layout, crash_recipe())
    except StorageError as error:
        assert str(root) in error.what, error
        return layout, error, operations.refused
    return layout, None, operations.refused


def check_end(layout: RunLayout, expected: Ending, where: str) -> None:
    """The same command again, on a disk that takes everything, if it is still needed."""
    with installed(QuickOperations()):
        live(layout, crash_recipe())
    assert ending_of(layout) == expected, where
    assert audit_run(layout).violations == (), where


def places(mutations: int, offset: int) -> Iterator[int]:
    return iter(range(1 + offset, mutations + 1, SOME))


def check_full(root: Path, first: int, number: int, times: int, expected: Ending) -> None:
    layout, error, refused = disturb(root, first, number, times)
    assert refused, "the fault must have happened"
    if isinstance(error, AlreadyExistsError):
        # A checkpoint was visible when its directory could not be synced: the trainer is started again, and finds it.
        assert [text for text in refused if re.fullmatch(r"sync_directory .*/checkpoints/\d{6}", text)], (
            f"{refused}: {error}"
        )
    elif error is not None:
        assert isinstance(error, StorageFullError), f"{refused}: {error}"
        at_work = layout.event_log("trainer-0", 1).exists()
        assert not at_work, f"only a start may end for want of space, whoever is at work waits: {refused}: {error}"
    check_end(layout, expected, f"{refused}")


def check_refused(root: Path, first: int, number: int, times: int, expected: Ending) -> None:
    layout, error, refused = disturb(root, first, number, times)
    assert refused, "the fault must have happened"
    if number == errno.EROFS:
        assert isinstance(error, StorageReadOnlyError), f"{refused[0]}: {error}"
    check_end(layout, expected, f"{refused[:3]}: {error}")


FULL = {"space": (errno.ENOSPC, 1), "space-thrice": (errno.ENOSPC, 3), "quota": (errno.EDQUOT, 2)}
REFUSED = {"error": (errno.EIO, 1), "read-only": (errno.EROFS, FOR_EVER)}


@pytest.mark.parametrize(("how", "offset"), [("space", 0), ("space-thrice", 13), ("quota", 27)])
def test_some_places_without_space(tmp_path: Path, mutations: int, expected: Ending, how: str, offset: int) -> None:
    for first in places(mutations, offset):
        check_full(tmp_path, first, *FULL[how], expected)


@pytest.mark.parametrize(("how", "offset"), [("error", 7), ("read-only", 33)])
def test_some_places_that_are_refused(tmp_path: Path, mutations: int, expected: Ending, how: str, offset: int) -> None:
    for first in places(mutations, offset):
        check_refused(tmp_path, first, *REFUSED[how], expected)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", FULL)
def test_every_place_without_space(tmp_path: Path, mutations: int, expected: Ending, how: str) -> None:
    for first in range(1, mutations + 1):
        check_full(tmp_path, first, *FULL[how], expected)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", REFUSED)
def test_every_place_that_is_refused(tmp_path: Path, mutations: int, expected: Ending, how: str) -> None:
    for first in range(1, mutations + 1):
        check_refused(tmp_path, first, *REFUSED[how], expected)
