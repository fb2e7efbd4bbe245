"""What a disk may hold after a crash: a model of directories and files with what is visible and what is durable.

Rules of the model (no less than POSIX promises, and less than common filesystems do):

* data of a file is durable up to its last ``sync_file``; later data may be missing, torn in its last write, or zeros;
* a change of a name is durable once its directory was synced; changes that were not are lost, or kept, each by itself and
  in any order, the two names of a rename included;
* diagnosis is never synced (event logs, hints, reasons in quarantine): each file may be torn or empty. Only here it counts
  as written back by the kernel after some mutations, because it would double the number of states for ever.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from crash_log import Mutation

from milesbatch.store.durable import TEMPORARY_PREFIX

Files = dict[str, bytes | None]
"""Path -> content; None is a directory."""

ALL_SUBSETS = 4
"""Up to so many unsynced changes of names, every combination of them is tried."""
NEWEST = 8
"""Only so many are varied one by one; a sound protocol never has as many."""
WRITE_BACK = 16
"""Mutations after which diagnosis counts as durable."""
EVENTS = "run/events/"
DIAGNOSIS = (".alive", ".reason.txt")


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: int = 0
    last_write: int = 0
    number: int = 0
    """Of the mutation that changed it last."""
    _frozen: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    def cut(self, length: int, zeros: int = 0) -> bytes:
        key = (len(self.data), length, zeros)
        if key not in self._frozen:
            self._frozen[key] = bytes(self.data[:length]) + bytes(zeros)
        return self._frozen[key]


@dataclass(eq=False)
class Change:
    """A name that was given, changed or taken, and is not durable."""

    number: int
    name: str
    node: File | Directory | None


@dataclass(eq=False)
class Directory:
    durable: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def entries(self, keeps: Callable[[Change], bool]) -> dict[str, File | Directory]:
        entries = dict(self.durable)
        for change in self.pending:
            if keeps(change):
                if change.node is None:
                    entries.pop(change.name, None)
                else:
                    entries[change.name] = change.node
        return entries

    def sync(self) -> None:
        self.durable, self.pending = self.entries(keep_all), []

    def write_back(self, until: int) -> None:
        """Diagnosis that was last changed at mutation ``until`` or before is durable now."""
        for change in [change for change in self.pending if change.number <= until]:
            if change.name.endswith(DIAGNOSIS) or change.name.startswith(TEMPORARY_PREFIX):
                self.pending.remove(change)
                if change.node is None:
                    self.durable.pop(change.name, None)
                else:
                    self.durable[change.name] = change.node
        for name, node in self.durable.items():
            if name.endswith(DIAGNOSIS) and isinstance(node, File) and node.number <= until:
                node.synced = len(node.data)


def keep_all(change: Change) -> bool:
    return True


def keep_none(change: Change) -> bool:
    return False


def whole(file: File) -> bytes:
    return file.cut(len(file.data))


def synced_only(file: File) -> bytes:
    return file.cut(file.synced)


def torn(file: File) -> bytes:
    """Half of the last write, and nothing of the writes before it is missing."""
    begin = max(file.synced, min(file.last_write, len(file.data)))
    return file.cut(begin + (len(file.data) - begin) // 2)


def zeros(file: File) -> bytes:
    """The length arrived, the data did not."""
    return file.cut(file.synced, len(file.data) - file.synced)


class Disk:
    """A disk as mutations change it."""

    def __init__(self) -> None:
        self.root = Directory()
        self._number = 0

    def apply(self, mutation: Mutation) -> None:
        self._number += 1
        getattr(self, f"_{mutation.kind}")(mutation)
        for directory in self._directories(self.root):
            directory.write_back(self._number - WRITE_BACK)

    def files(self, keeps: Callable[[Change], bool], content: Callable[[File], bytes]) -> Files:
        """The disk with these unsynced changes kept, and this of each file's data."""
        return dict(self._walk(self.root, "", keeps, content))

    def pending(self) -> list[Change]:
        """Unsynced changes of names that are reachable, oldest first."""
        changes = [change for directory in self._directories(self.root) for change in directory.pending]
        return sorted(changes, key=lambda change: change.number)

    # -- mutations --------------------------------------------------------------------------------------------------

    def _create(self, mutation: Mutation) -> None:
        self._set(mutation.path, File())

    def _write(self, mutation: Mutation) -> None:
        file = self._file(mutation.path)
        file.last_write, file.number = mutation.offset, self._number
        file.data[mutation.offset : mutation.offset + len(mutation.data)] = mutation.data

    def _append(self, mutation: Mutation) -> None:
        """An event: its file's name is taken for durable (nothing decides by it), its data never is."""
        directory, name = self._place(mutation.path)
        if name not in directory.entries(keep_all):
            directory.durable[name] = File()
        file = self._file(mutation.path)
        file.last_write = len(file.data)
        file.data += mutation.data

    def _sync_file(self, mutation: Mutation) -> None:
        file = self._file(mutation.path)
        file.synced = len(file.data)

    def _sync_directory(self, mutation: Mutation) -> None:
        self._directory(mutation.path).sync()

    def _link(self, mutation: Mutation) -> None:
        self._set(mutation.target, self._node(mutation.path))

    def _rename(self, mutation: Mutation) -> None:
        self._set(mutation.target, self._node(mutation.path))
        self._set(mutation.path, None)

    def _unlink(self, mutation: Mutation) -> None:
        self._set(mutation.path, None)

    def _make_directory(self, mutation: Mutation) -> None:
        self._set(mutation.path, Directory())

    def _remove_directory(self, mutation: Mutation) -> None:
        self._set(mutation.path, None)

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _set(self, path: str, node: File | Directory | None) -> None:
        directory, name = self._place(path)
        directory.pending.append(Change(self._number, name, node))

    def _place(self, path: str) -> tuple[Directory, str]:
        pure = PurePosixPath(path)
        return self._directory(str(pure.parent)), pure.name

    def _node(self, path: str) -> File | Directory:
        node: File | Directory = self.root
        for part in PurePosixPath(path).parts:
            assert isinstance(node, Directory), path
            node = node.entries(keep_all)[part]
        return node

    def _directory(self, path: str) -> Directory:
        node = self._node(path)
        assert isinstance(node, Directory), path
        return node

    def _file(self, path: str) -> File:
        node = self._node(path)
        assert isinstance(node, File), path
        return node

    def _directories(self, directory: Directory) -> Iterator[Directory]:
        yield directory
        for node in directory.entries(keep_all).values():
            if isinstance(node, Directory):
                yield from self._directories(node)

    def _walk(
        self, directory: Directory, prefix: str, keeps: Callable[[Change], bool], content: Callable[[File], bytes]
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, node in directory.entries(keeps).items():
            path = prefix + name
            if isinstance(node, File):
                yield path, content(node)
            else:
                yield path, None
                yield from self._walk(node, path + "/", keeps, content)


@dataclass(frozen=True, slots=True)
class CrashState:
    """What the disk holds after a crash behind mutation ``number``."""

    number: int
    kind: str
    files: Files
    durable: Files
    """What had to survive."""

    def __str__(self) -> str:
        return f"mutation {self.number}, {self.kind}"


def states_after(disk: Disk, number: int) -> Iterator[CrashState]:
    """Every state that is tried after one mutation; many are equal to others."""
    durable = disk.files(keep_none, synced_only)
    for kind, keeps, content in _ways(disk.pending()):
        yield CrashState(number, kind, disk.files(keeps, content), durable)


def _ways(pending: Sequence[Change]) -> Iterator[tuple[str, Callable[[Change], bool], Callable[[File], bytes]]]:
    yield "killed", keep_all, whole
    yield "power lost", keep_none, synced_only
    yield "data missing", keep_all, synced_only
    yield "data torn", keep_all, torn
    yield "data zeroed", keep_all, zeros
    for lost in _lost(pending):
        names = ", ".join(f"{change.name}{'' if change.node else ' (gone)'}" for change in lost)
        keeps = _all_but(lost)
        yield f"without the changes {names}", keeps, synced_only
        yield f"without the changes {names}, data whole", keeps, whole


def _all_but(lost: Iterable[Change]) -> Callable[[Change], bool]:
    numbers = {id(change) for change in lost}
    return lambda change: id(change) not in numbers


def _lost(pending: Sequence[Change]) -> Iterator[Sequence[Change]]:
    """Sets of unsynced changes that may be lost while the others are kept."""
    pending = pending[-NEWEST:]
    if len(pending) <= ALL_SUBSETS:
        for count in range(1, len(pending) + 1):
            yield from itertools.combinations(pending, count)
        return
    for index, change in enumerate(pending):
        yield [change]
        yield [*pending[:index], *pending[index + 1 :]]
        yield pending[: index + 1]
        yield pending[index:]


def crash_states(mutations: Sequence[Mutation], behind: Collection[int] | None = None) -> Iterator[CrashState]:
    """The states after each prefix of ``mutations``, the empty one included, or after the prefixes ``behind`` only."""
    disk = Disk()
    for number in range(len(mutations) + 1):
        if number:
            disk.apply(mutations[number - 1])
        if behind is None or number in behind:
            yield from states_after(disk, number)


def unsettled(mutations: Sequence[Mutation]) -> Iterator[tuple[int, Disk]]:
    """After each mutation that changed the name of an artefact: the disk, with that change not yet durable."""
    disk = Disk()
    for number, mutation in enumerate(mutations, 1):
        disk.apply(mutation)
        latest = disk.pending()[-1:]
        if latest and latest[0].number == number and not latest[0].name.startswith(TEMPORARY_PREFIX):
            yield number, copy.deepcopy(disk)


def content_key(files: Mapping[str, bytes | None]) -> frozenset[tuple[str, bytes | None]]:
    """Equal for states that differ in their event logs at most."""
    return frozenset((path, data) for path, data in files.items() if not path.startswith(EVENTS))


def build(files: Files, root: Path) -> None:
    """Write a state below ``root``, which is empty or not there."""
    root.mkdir(exist_ok=True)
    for path in sorted(files):
        data = files[path]
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
