"""Processes that take one store operation at a time, when they are told to: threads, of which never more than one runs.

    actor = Actor("trainer-0.i1", main); actor.step() ──> main runs up to its next mutation (or question), and waits there

An actor that is never stepped again is a process that hangs; one that is stepped late is a zombie that wakes up; a killed
one does nothing more, no handler and no ``finally`` included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from crash_log import Killed, QuickOperations

_local = threading.local()


class Actor:
    """One process. ``place`` says what it is about to do."""

    def __init__(self, name: str, incarnation: int, main: Callable[[], None]) -> None:
        self.name, self.incarnation, self.place = name, incarnation, "start"
        self.error: BaseException | None = None
        self.has_ended = False
        self._main, self._is_killed = main, False
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let it do what it is about to do, and everything up to its next operation."""
        if not self.has_ended:
            self._go.release()
            self._waits.acquire()

    def kill(self) -> None:
        self._is_killed = True
        while not self.has_ended:
            self.step()

    def pause(self, place: str) -> None:
        """In its thread: wait to be stepped."""
        if self._is_killed:
            raise Killed(place)
        self.place = place
        self._waits.release()
        self._go.acquire()
        if self._is_killed:
            raise Killed(place)

    def _run(self) -> None:
        _local.actor = self
        self._go.acquire()
        try:
            if not self._is_killed:
                self._main()
        except BaseException as error:  # noqa: BLE001 - judged by the machine
            self.error = None if isinstance(error, Killed) else error
        self.has_ended = True
        self._waits.release()


def pause(place: str) -> None:
    """The current actor, if this thread is one, is about to do ``place``."""
    actor = getattr(_local, "actor", None)
    if actor is not None:
        actor.pause(place)


def _pause(operation: str, path: Path, target: Path | None = None) -> None:
    """Not for what happens in quarantine: taking something away, looking at it, and putting it back is one move."""
    if path.parent.name != "quarantine":
        shown = target or path
        pause(f"{operation} {shown.parent.name}/{shown.name}")


class SteppedOperations(QuickOperations):
    """The operating system's operations; an actor waits before each. ``committed`` is told of each link, and who made it;
    ``changed`` of each other name that was given or taken away."""

    def __init__(self, committed: Callable[[Actor | None, Path], None], changed: Callable[[Path], None]) -> None:
        self._committed, self._changed = committed, changed

    def create(self, path: Path) -> BinaryIO:
        _pause("create", path)
        return super().create(path)

    def link(self, source: Path, target: Path) -> None:
        _pause("link", source, target)
        super().link(source, target)
        self._committed(getattr(_local, "actor", None), target)
        self._changed(target)

    def rename(self, source: Path, target: Path) -> None:
        _pause("rename", source)
        super().rename(source, target)
        self._changed(source)

    def replace(self, source: Path, target: Path) -> None:
        _pause("replace", target)
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        _pause("unlink", path)
        super().unlink(path)
        self._changed(path)

    def make_directory(self, path: Path) -> None:
        _pause("make", path)
        super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        _pause("remove", path)
        super().remove_directory(path)
        self._changed(path)
