"""One directory as several hosts see it: a shared filesystem with the habits of NFS, Lustre and BeeGFS, in one process.

    with SharedFilesystem(place, NFS, seed).mounted() as shared:
        a, b = shared.mount("a"), shared.mount("b")     # the same directory on two hosts
        publish_file(a / "x", b"1")                      # through milesbatch.store.operations, as ever
        (b / "x").exists()                               # False for a while

The truth is a tree of names in memory; content lies in real files beside it. Whoever uses a path below a mount is that
host: mutations come in through the operations door (``milesbatch/store/operations.py``), reads through ``open``, ``os.stat``,
``os.listdir`` and ``os.scandir``, which are replaced while it is mounted (so production code has no seam for it). Time is
simulated: it passes with each operation, and when somebody sleeps. The host ``truth`` sees everything at once.

Everything follows from the seed: delays from a hash of (seed, host, change), mishaps from one generator, so that the same calls
meet the same habits.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from unittest import mock

import xxhash

from milesbatch.store.durable import SILLY_PREFIX
from milesbatch.store.operations import Operations, installed

TRUTH = "truth"
READ_S, CHANGE_S = 0.002, 0.01
_WAITING_MODULES = (
    "store.sight",
    "store.patience",
    "store.liveness",
    "store.takeover",
    "trainer.loop",
    "audit.patience",
)
_DATING_MODULES = ("store.clock", "rollout.loop")
_NAMING_MODULES = ("store.durable", "store.sight", "store.create")
Parts = tuple[str, ...]


@dataclass(frozen=True)
class Habits:
    """What a filesystem does to its clients. Times are the longest ones, in simulated seconds; shares are of 1."""

    seen_s: float = 0.0
    """Until a change of a name, made elsewhere, is seen by somebody who asks for that name. Each change has its own."""
    missing_s: float = 0.0
    """For so long a name that was found missing stays missing, whatever happened meanwhile."""
    listed_s: float = 0.0
    """Until it is seen in a listing of the directory."""
    whole_s: float = 0.0
    """Until a reader elsewhere gets all of a file's content; a beginning of it before."""
    sized_s: float = 0.0
    """Until ``stat`` elsewhere tells a file's size; a smaller one before."""
    first_look_is_fresh: bool = False
    """Whether a host that never asked for a name (never listed a directory) sees it as it is: NFS's only delays are those of
    its caches."""
    at_once: float = 0.3
    """Share of the changes that are seen without any delay."""
    own_change_refreshes: bool = False
    """Whether a host that changes a directory sees all of it as it is then (NFS: its cache of the directory is dropped)."""
    lost_replies: float = 0.0
    """Share of mutations that are carried out and answered with an error: EEXIST, ENOENT or EIO."""
    refused: float = 0.0
    """Share of creations that fail with EIO."""
    stale_handles: float = 0.0
    """Share of opens of a replaced or removed file that fail with ESTALE."""
    silly_names: float = 0.0
    """Share of removed files that stay as ``.nfs...`` for a while."""
    spared: tuple[str, ...] = (".distcp",)
    """Endings of files that torch writes in production: it opens them whether they exist or not, and gives up at an error."""
    full_targets: int = 0
    """Of 8 storage targets so many are full: files whose (temporary) name leads there find no space."""

    @property
    def longest_s(self) -> float:
        """After so long everybody sees a change, whatever he asked before."""
        return max(self.seen_s + self.missing_s, self.listed_s, self.seen_s + self.missing_s + self.whole_s)


NFS = Habits(
    seen_s=30.0, missing_s=30.0, listed_s=30.0, sized_s=30.0, first_look_is_fresh=True, own_change_refreshes=True,
    lost_replies=0.01, stale_handles=0.5, silly_names=0.2,
)  # fmt: skip
LUSTRE = Habits(seen_s=1.0, listed_s=2.0, sized_s=2.0, whole_s=1.0, at_once=0.7, full_targets=1, refused=0.002)
BEEGFS = Habits(seen_s=1.0, missing_s=1.0, listed_s=2.0, sized_s=1.0, lost_replies=0.005, refused=0.01, full_targets=1)
HOSTILE = Habits(
    seen_s=20.0, missing_s=10.0, listed_s=40.0, whole_s=10.0, sized_s=10.0, at_once=0.2,
    lost_replies=0.01, stale_handles=0.5, silly_names=0.3,
)  # fmt: skip
"""Nothing helps but waiting: worse than any of the three."""
PROFILES = {"nfs": NFS, "lustre": LUSTRE, "beegfs": BEEGFS, "hostile": HOSTILE}
"""By name, for tests over all of them."""


@dataclass(eq=False)
class Node:
    """A file or a directory."""

    number: int
    is_directory: bool
    creator: str
    done_at_s: float
    """When its content was last made whole."""
    changes: dict[str, list[Change]] = field(default_factory=dict)
    """Of a directory: what became of each name, oldest first."""
    is_gone: bool = False


@dataclass(frozen=True, eq=False)
class Change:
    """A name was given to ``node``, or taken away."""

    number: int
    at_s: float
    host: str
    node: Node | None


class Clock:
    """Simulated time, with the names of the module ``time`` that waiting code uses."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def now(self, zone: tzinfo) -> datetime:
        """As ``datetime.now``."""
        return datetime.fromtimestamp(self.now_s, zone)


class Tokens:
    """Random names that follow from a seed, as the module ``secrets`` gives them."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def token_hex(self, num_bytes: int) -> str:
        return self._draw.randbytes(num_bytes).hex()


class SharedFilesystem:
    """The directory, its hosts, and the clock."""

    def __init__(self, place: Path, habits: Habits, seed: int) -> None:
        self.habits, self.seed, self.clock = habits, seed, Clock()
        self.pause: Callable[[str, Path], None] = lambda operation, path: None
        """Called before each mutation."""
        self.mishaps: dict[str, int] = {}
        """How often each habit showed, so that a test can prove that it did."""
        self._place = place
        self._mounts = str(place / "on") + "/"
        self._draw = random.Random(seed)
        self._numbers = 0
        self._seen: dict[tuple[str, int, str, str], int] = {}
        self._missing: dict[tuple[str, int, str], float] = {}
        self._listed: set[tuple[str, int]] = set()
        self._refreshed: dict[tuple[str, int], float] = {}
        self._silly: list[tuple[float, Node, str]] = []
        self._real: dict[str, Callable[..., Any]] = {}
        for name in ("content", "cut", "on"):
            (place / name).mkdir(parents=True)
        self._root = self._node(is_directory=True, host=TRUTH)

    def mount(self, host: str) -> Path:
        """Where ``host`` sees the directory. Not a real directory: it is there while :meth:`mounted`."""
        return Path(self._mounts + host)

    @property
    def truth(self) -> Path:
        return self.mount(TRUTH)

    def settle(self) -> None:
        """Let so much time pass that everybody sees what there is."""
        self.clock.now_s += self.habits.longest_s + 1

    def with_habits(self, **changes: Any) -> None:
        """Other habits from now on."""
        self.habits = replace(self.habits, **changes)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[SharedFilesystem]:
        """Between here and the end paths below a mount are of this filesystem, for the whole process."""
        readers = {"open": self._open, "stat": self._stat, "lstat": self._stat}
        readers |= {"listdir": self._listdir, "scandir": self._scandir}
        self._real = {name: getattr(os, name) for name in readers if name != "open"} | {"open": builtins.open}
        with contextlib.ExitStack() as stack:
            for name, reader in readers.items():
                places = ("builtins.open", "io.open") if name == "open" else (f"os.{name}",)
                for place in places:
                    stack.enter_context(mock.patch(place, self._reader(name, reader)))
            for module in _WAITING_MODULES:
                stack.enter_context(mock.patch(f"milesbatch.{module}.time", self.clock))
            for module in _DATING_MODULES:
                stack.enter_context(mock.patch(f"milesbatch.{module}.datetime", self.clock))
            for module in _NAMING_MODULES:
                stack.enter_context(mock.patch(f"milesbatch.{module}.secrets", Tokens(self.seed)))
            stack.enter_context(mock.patch("milesbatch.store.sight.is_local", lambda place: False))
            stack.enter_context(installed(HostOperations(self)))
            yield self

    # -- reading ----------------------------------------------------------------------------------------------------

    def _reader(self, name: str, reader: Callable[..., Any]) -> Callable[..., Any]:
        real = self._real[name]

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            split = self._split(path)
            return real(path, *args, **kwargs) if split is None else reader(path, *split, *args, **kwargs)

        return read

    def _split(self, path: Any) -> tuple[str, Parts] | None:
        if isinstance(path, int):
            return None
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith(self._mounts):
            return None
        host, *parts = text[len(self._mounts) :].split("/")
        return host, tuple(part for part in parts if part)

    def _open(self, path: Any, host: str, parts: Parts, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        self._pass(READ_S)
        if "r" in mode:
            return cast("IO[Any]", self._real["open"](self._readable(host, parts, path), mode, *args, **kwargs))
        directory = self._directory(host, parts[:-1], path)  # event logs, and test code: not through the door
        node = self._latest(directory, parts[-1])
        if node is None:
            node = self._node(is_directory=False, host=host)
            self._change(host, directory, parts[-1], node)
        node.done_at_s = self.clock.now_s
        self._see_latest(host, directory, parts[-1])
        return cast("IO[Any]", self._real["open"](self._content(node), mode, *args, **kwargs))

    def _readable(self, host: str, parts: Parts, path: Any) -> Path:
        """The real file that ``host`` reads now: all of it, or a beginning."""
        directory, name = self._directory(host, parts[:-1], path), parts[-1]
        node = self._look(host, directory, name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        if node is not self._latest(directory, name) and self._happens("stale_handles"):
            self._see_latest(host, directory, name)
            raise _error(errno.ESTALE, path)
        whole = self._content(node)
        size = self._visible_size(host, node, self.habits.whole_s, "whole")
        if size is None:
            return whole
        self._count("cut short")
        cut = self._place / "cut" / f"{node.number}-{size}"
        with self._real["open"](whole, "rb") as source, self._real["open"](cut, "wb") as target:
            target.write(source.read(size))
        return cut

    def _stat(self, path: Any, host: str, parts: Parts, **kwargs: Any) -> os.stat_result:
        self._pass(READ_S)
        node = self._find(host, parts, path)
        if node.is_directory:
            return cast(os.stat_result, self._real["stat"](self._place / "content"))
        size = self._visible_size(host, node, self.habits.sized_s, "sized")
        if size is None:
            return cast(os.stat_result, self._real["stat"](self._content(node)))
        self._count("old size")
        sample = self._place / "cut" / f"size-{size}"
        with self._real["open"](sample, "wb") as stream:
            stream.truncate(size)
        return cast(os.stat_result, self._real["stat"](sample))

    def _listdir(self, path: Any, host: str, parts: Parts) -> list[str]:
        return [entry.name for entry in self._scandir(path, host, parts)]

    def _scandir(self, path: Any, host: str, parts: Parts) -> Listing:
        self._pass(READ_S)
        directory = self._find(host, parts, path)
        if not directory.is_directory:
            raise _error(errno.ENOTDIR, path)
        entries = []
        for name in directory.changes:
            node = self._look(host, directory, name, "listed")
            if node is not self._latest(directory, name):
                self._count("old listing")
            if node is not None:
                entries.append(Entry(name, f"{os.fspath(path)}/{name}", node))
        self._listed.add((host, directory.number))
        entries.sort(key=lambda entry: self._unit("order", host, entry.name))
        return Listing(entries)

    def _visible_size(self, host: str, node: Node, longest_s: float, kind: str) -> int | None:
        """Bytes that ``host`` knows of; None for all."""
        if host in (TRUTH, node.creator) or self.clock.now_s >= node.done_at_s + self._delay(
            host, node, longest_s, kind
        ):
            return None
        share = max(0.0, 2 * self._unit("share", host, node.number) - 1)  # nothing in half of the cases
        size: int = self._real["stat"](self._content(node)).st_size
        return int(size * share) if size else None

    def _find(self, host: str, parts: Parts, path: Any) -> Node:
        node = self._root
        for part in parts:
            found = self._look(host, node, part) if node.is_directory else None
            if found is None:
                raise _error(errno.ENOENT if node.is_directory else errno.ENOTDIR, path)
            node = found
        return node

    def _directory(self, host: str, parts: Parts, path: Any) -> Node:
        node = self._find(host, parts, path)
        if not node.is_directory:
            raise _error(errno.ENOTDIR, path)
        return node

    def _look(self, host: str, directory: Node, name: str, kind: str = "seen") -> Node | None:
        """What the name is to ``host``; what it has seen once it does not forget."""
        changes = directory.changes.get(name, ())
        if host == TRUTH:
            return changes[-1].node if changes else None
        key = (host, directory.number, name, kind)
        index = self._seen.get(key, -1)
        if self.habits.first_look_is_fresh and self._is_first_look(host, directory, name, kind):
            index = len(changes) - 1
        for later in range(len(changes) - 1, index, -1):
            if self._sees(host, directory, changes[later], kind):
                index = later
                break
        self._seen[key] = index
        node = changes[index].node if index >= 0 else None
        return self._remembered_as_missing(key[:3], node) if kind == "seen" else node

    def _is_first_look(self, host: str, directory: Node, name: str, kind: str) -> bool:
        if kind == "seen":
            return (host, directory.number, name, kind) not in self._seen
        return (host, directory.number) not in self._listed

    def _remembered_as_missing(self, key: tuple[str, int, str], node: Node | None) -> Node | None:
        until_s = self._missing.get(key, 0.0)
        if self.clock.now_s < until_s:
            if node is not None:
                self._count("kept missing")
            return None
        if node is None and self.habits.missing_s:
            self._missing[key] = self.clock.now_s + self.habits.missing_s * self._unit("missing", *key)
        return node

    def _sees(self, host: str, directory: Node, change: Change, kind: str) -> bool:
        if change.host == host or change.at_s <= self._refreshed.get((host, directory.number), 0.0):
            return True
        longest_s = self.habits.seen_s if kind == "seen" else self.habits.listed_s
        if self.clock.now_s >= change.at_s + self._delay(host, change, longest_s, kind):
            return True
        self._count("seen late" if kind == "seen" else "listed late")
        return False

    def _delay(self, host: str, what: Change | Node, longest_s: float, kind: str) -> float:
        if longest_s == 0:
            return 0.0
        unit = self._unit(kind, host, what.number)
        return max(0.0, (unit - self.habits.at_once) / (1 - self.habits.at_once)) * longest_s

    def _unit(self, *what: object) -> float:
        """A number in [0, 1) that follows from the seed and ``what``."""
        return float(xxhash.xxh3_64_intdigest(repr((self.seed, *what)).encode()) / 2**64)

    # -- the truth --------------------------------------------------------------------------------------------------

    def _latest(self, directory: Node, name: str) -> Node | None:
        changes = directory.changes.get(name)
        return changes[-1].node if changes else None

    def _node(self, *, is_directory: bool, host: str) -> Node:
        self._numbers += 1
        return Node(self._numbers, is_directory, host, self.clock.now_s)

    def _content(self, node: Node) -> Path:
        return self._place / "content" / str(node.number)

    def _change(self, host: str, directory: Node, name: str, node: Node | None) -> None:
        self._numbers += 1
        directory.changes.setdefault(name, []).append(Change(self._numbers, self.clock.now_s, host, node))
        self._see_latest(host, directory, name)
        if self.habits.own_change_refreshes:
            self._refreshed[host, directory.number] = self.clock.now_s
            for key in [key for key in self._missing if key[:2] == (host, directory.number)]:
                del self._missing[key]

    def _see_latest(self, host: str, directory: Node, name: str) -> None:
        for kind in ("seen", "listed"):
            self._seen[host, directory.number, name, kind] = len(directory.changes.get(name, ())) - 1
        self._missing.pop((host, directory.number, name), None)

    def _pass(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for due in [entry for entry in self._silly if entry[0] <= self.clock.now_s]:
            self._silly.remove(due)
            _, directory, name = due
            if self._latest(directory, name) is not None:
                self._change(TRUTH, directory, name, None)

    def _happens(self, habit: str) -> bool:
        share = getattr(self.habits, habit)
        if share == 0 or self._draw.random() >= share:
            return False
        self._count(habit)
        return True

    def _count(self, habit: str) -> None:
        self.mishaps[habit] = self.mishaps.get(habit, 0) + 1


class HostOperations(Operations):
    """Mutations as the hosts ask for them: carried out on the truth at once, answered as the habits allow."""

    def __init__(self, shared: SharedFilesystem) -> None:
        self._shared = shared

    def create(self, path: Path) -> BinaryIO:
        shared, host, directory, name = self._begin("create", path)
        if not name.endswith(shared.habits.spared) and shared._happens("refused"):
            raise _error(errno.EIO, path)
        if shared._latest(directory, name) is not None and not name.endswith(shared.habits.spared):
            shared._see_latest(host, directory, name)
            raise _error(errno.EEXIST, path)
        node = shared._node(is_directory=False, host=host)
        shared._change(host, directory, name, node)
        content = shared._content(node)
        is_spared = name.endswith(shared.habits.spared)
        if not is_spared and shared._unit("target", node.number) * 8 < shared.habits.full_targets:
            shared._count("full target")
            return cast(BinaryIO, io.BufferedWriter(_Full(content, "x")))
        stream = cast(BinaryIO, shared._real["open"](content, "xb"))
        with contextlib.ExitStack() as lost:
            lost.callback(stream.close)
            self._answer(path, errno.EEXIST)
            lost.pop_all()
        return stream

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        shared, _, directory, name = self._begin("sync_file", path)
        if stream.writable():
            stream.flush()
            node = shared._latest(directory, name)
            if node is not None:
                node.done_at_s = shared.clock.now_s

    def sync_directory(self, path: Path) -> None:
        host, parts = self._place(path)
        self._shared.pause("sync_directory", path)
        self._shared._pass(READ_S)
        self._shared._directory(host, parts, path)

    def link(self, source: Path, target: Path) -> None:
        shared, host, directory, name = self._begin("link", target)
        node = self._existing(source)
        if shared._latest(directory, name) is not None:
            shared._see_latest(host, directory, name)
            raise _error(errno.EEXIST, target)
        node.done_at_s = shared.clock.now_s
        shared._change(host, directory, name, node)
        self._answer(target, errno.EEXIST)

    def rename(self, source: Path, target: Path) -> None:
        shared, host, directory, name = self._begin("rename", target)
        node = self._existing(source)
        replaced = shared._latest(directory, name)
        if replaced is not None and replaced.is_directory and self._names(replaced):
            raise _error(errno.ENOTEMPTY, target)
        source_host, parts = self._place(source)
        shared._change(host, shared._directory(source_host, parts[:-1], source), parts[-1], None)
        shared._change(host, directory, name, node)
        self._answer(source, errno.ENOENT)

    def replace(self, source: Path, target: Path) -> None:
        self.rename(source, target)

    def unlink(self, path: Path) -> None:
        shared, host, directory, name = self._begin("unlink", path)
        node = self._existing(path)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        shared._change(host, directory, name, None)
        if not name.startswith(SILLY_PREFIX) and shared._happens("silly_names"):
            silly = f"{SILLY_PREFIX}{node.number:08x}"
            shared._change(host, directory, silly, node)
            shared._silly.append((shared.clock.now_s + 5.0, directory, silly))
        self._answer(path, errno.ENOENT)

    def make_directory(self, path: Path) -> None:
        shared, host, directory, name = self._begin("make_directory", path)
        if shared._latest(directory, name) is not None:
            shared._see_latest(host, directory, name)
            raise _error(errno.EEXIST, path)
        shared._change(host, directory, name, shared._node(is_directory=True, host=host))
        self._answer(path, errno.EEXIST)

    def remove_directory(self, path: Path) -> None:
        shared, host, directory, name = self._begin("remove_directory", path)
        node = self._existing(path)
        if self._names(node):
            raise _error(errno.ENOTEMPTY, path)
        node.is_gone = True
        shared._change(host, directory, name, None)
        self._answer(path, errno.ENOENT)

    def _begin(self, operation: str, path: Path) -> tuple[SharedFilesystem, str, Node, str]:
        """Host, directory (as the host knows it) and name of what is to be changed."""
        shared = self._shared
        shared.pause(operation, path)
        shared._pass(CHANGE_S)
        host, parts = self._place(path)
        directory = shared._directory(host, parts[:-1], path)
        if directory.is_gone:
            raise _error(errno.ESTALE, path)
        return shared, host, directory, parts[-1]

    def _existing(self, path: Path) -> Node:
        host, parts = self._place(path)
        directory = self._shared._directory(host, parts[:-1], path)
        node = self._shared._latest(directory, parts[-1])
        self._shared._see_latest(host, directory, parts[-1])
        if node is None:
            raise _error(errno.ENOENT, path)
        return node

    def _names(self, directory: Node) -> list[str]:
        return [name for name, changes in directory.changes.items() if changes[-1].node is not None]

    def _place(self, path: Path) -> tuple[str, Parts]:
        split = self._shared._split(path)
        assert split is not None, f"{path} is not below a mount"
        return split

    def _answer(self, path: Path, repeated: int) -> None:
        """It is done; but does the host hear so? The error is what a repeated request gives, or none of its business."""
        is_spared = self._place(path)[0] == TRUTH or path.name.endswith(self._shared.habits.spared)
        if not is_spared and self._shared._happens("lost_replies"):
            raise _error(self._shared._draw.choice((repeated, errno.EIO)), path)


@dataclass(frozen=True)
class Entry:
    """As ``os.DirEntry``."""

    name: str
    path: str
    node: Node

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.node.is_directory

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.node.is_directory

    def is_symlink(self) -> bool:
        return False


class Listing:
    """As what ``os.scandir`` returns."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Listing:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def close(self) -> None:
        return

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *error: object) -> None:
        return


class _Full(io.FileIO):
    """A file on a target without space."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        super().close()


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))
