"""Notes every mutation of a run, and kills the process at a chosen one."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations

_BUFFER_BYTES = 8192


class Killed(BaseException):
    """The process ends here: nothing after it happens, no handler and no ``finally`` included."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change. Paths are relative to the directory that holds the run; ``data`` is what a write wrote."""

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (f" -> {self.target}" if self.target else "")


@dataclass
class MutationLog:
    """All mutations below ``root``, in order. Those of kinds in ``deaf`` are done but not noted: bugs to be found."""

    root: Path
    deaf: frozenset[str] = frozenset()
    mutations: list[Mutation] = field(default_factory=list)
    kill_at: Callable[[Mutation], bool] = lambda mutation: False
    is_dead: bool = False

    def before(self, kind: str, path: Path, target: Path | None = None) -> Mutation:
        mutation = Mutation(kind, self._name(path), self._name(target) if target is not None else "")
        if self.kill_at(mutation):
            self.is_dead = True
        if self.is_dead:
            raise Killed(str(mutation))
        return mutation

    def note(self, mutation: Mutation) -> None:
        if mutation.kind not in self.deaf:
            self.mutations.append(mutation)

    def wrote(self, path: Path, offset: int, data: bytes) -> None:
        self.note(Mutation("write", self._name(path), "", offset, data))

    def appended(self, path: Path, data: bytes) -> None:
        """A line of an event log: diagnosis."""
        self.note(Mutation("append", self._name(path), "", 0, data))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


class RecordingOperations(Operations):
    """The operating system's operations, each noted once it is done."""

    def __init__(self, log: MutationLog) -> None:
        self._log = log

    def create(self, path: Path) -> BinaryIO:
        mutation = self._log.before("create", path)
        raw = _NotedFile(path, self._log)
        self._log.note(mutation)
        # The same buffer as the real one has, so that what is noted is what the system is asked to write.
        return cast(BinaryIO, io.BufferedWriter(raw, _BUFFER_BYTES))

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        stream.flush()
        mutation = self._log.before("sync_file", path)
        self._log.note(mutation)

    def sync_directory(self, path: Path) -> None:
        self._log.note(self._log.before("sync_directory", path))

    def link(self, source: Path, target: Path) -> None:
        mutation = self._log.before("link", source, target)
        super().link(source, target)
        self._log.note(mutation)

    def rename(self, source: Path, target: Path) -> None:
        mutation = self._log.before("rename", source, target)
        super().rename(source, target)
        self._log.note(mutation)

    def replace(self, source: Path, target: Path) -> None:
        mutation = self._log.before("rename", source, target)
        super().replace(source, target)
        self._log.note(mutation)

    def unlink(self, path: Path) -> None:
        mutation = self._log.before("unlink", path)
        super().unlink(path)
        self._log.note(mutation)

    def make_directory(self, path: Path) -> None:
        mutation = self._log.before("make_directory", path)
        super().make_directory(path)
        self._log.note(mutation)

    def remove_directory(self, path: Path) -> None:
        mutation = self._log.before("remove_directory", path)
        super().remove_directory(path)
        self._log.note(mutation)


class QuickOperations(Operations):
    """Syncs nothing, for continued runs: the machine that they run on is not going to lose power."""

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        stream.flush()

    def sync_directory(self, path: Path) -> None:
        return


class _NotedFile(io.FileIO):
    """A new file whose every write to the system is noted."""

    def __init__(self, path: Path, log: MutationLog) -> None:
        super().__init__(path, "x")
        self._path, self._log = path, log

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._log.before("write", self._path)
        offset = self.tell()
        count = super().write(content)
        assert count == len(content)
        self._log.wrote(self._path, offset, content)
        return count


def noted_events(log: MutationLog) -> Callable[[RunLayout, str, int], EventLog]:
    """Opens real event logs whose lines are noted."""

    class NotedEvents(EventLog):
        def __init__(self, layout: RunLayout, process: str, incarnation: int) -> None:
            super().__init__(layout, process, incarnation)
            self._where = layout.event_log(process, incarnation)

        def write(self, event: str, **fields: Any) -> None:
            if log.is_dead:
                raise Killed(event)
            size = self._where.stat().st_size
            super().write(event, **fields)
            log.appended(self._where, self._where.read_bytes()[size:])

    return NotedEvents
