"""What every artefact store must do, whatever it is made of. ``test_posix.py`` and ``test_object.py`` run all of it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.synchronize import Barrier
from typing import BinaryIO, Protocol

import pytest

from milesbatch.errors import CorruptArtefactError, FencedError, InputError, StorageError
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store.port import (
    AlreadyExistsError,
    ArtefactStore,
    KeyRefusedError,
    MissingArtefactError,
    OutcomeUnknownError,
)

Opener = Callable[[], ArtefactStore]
MANY = multiprocessing.get_context("spawn")


class Fired(Protocol):
    """How often the trouble that was asked for has happened."""

    fired: int


class Place(Protocol):
    """An empty store, and the ways to break it from outside."""

    open: Opener
    """Another client of it; can be sent to another process."""

    def lost_reply(self) -> AbstractContextManager[Fired]:
        """The next commit is carried out and then reported as failed."""

    def no_commit(self) -> AbstractContextManager[Fired]:
        """Each commit is reported as failed, and is not carried out."""

    def removals(self) -> AbstractContextManager[list[str]]:
        """Keys that are deleted meanwhile, in order."""

    def damage(self, key: str, data: bytes) -> None:
        """Replaces the content of a key behind the store's back."""

    def unfinished(self) -> list[str]:
        """What killed or failed writers left behind."""


def wins(store: ArtefactStore, key: str, data: bytes) -> bool:
    try:
        store.create_exclusively(key, data)
    except AlreadyExistsError:
        return False
    return True


def by_digest(digest: str) -> str:
    return f"{digest.removeprefix('xxh128:')[:16]}.bin"


def noise(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def in_chunks(data: bytes, size: int = 700_001) -> Callable[[BinaryIO], object]:
    return lambda stream: stream.writelines(data[i : i + size] for i in range(0, len(data), size))


def race(open_store: Opener, keys: list[str], index: int, start: Barrier, results: Results) -> None:
    """One process of a race for many keys."""
    store = open_store()
    store.exists("warm")
    for key in keys:
        start.wait()
        results.put((key, index, wins(store, key, f"process {index} ".encode() * 50)))


def write_until_killed(open_store: Opener, under_way: Event) -> None:
    """A process that is killed while it writes."""

    def write(stream: BinaryIO) -> None:
        stream.write(noise(12 << 20))
        stream.flush()
        under_way.set()
        time.sleep(60)

    open_store().publish("weights", "torn.bin", write)


Results = multiprocessing.SimpleQueue  # of (key, index, won)
Event = threading.Event


class Conformance:
    """The suite; a subclass gives the fixture ``place``."""

    @pytest.fixture
    def store(self, place: Place) -> ArtefactStore:
        return place.open()

    # -- exclusive creation ---------------------------------------------------------------------------------------------

    def test_what_was_created_is_there_for_everybody(self, place: Place, store: ArtefactStore) -> None:
        ref = store.create_exclusively("weights/000001/manifest.json", b"content")
        assert ref == FileRef(path="manifest.json", bytes=7, digest=digest_bytes(b"content"))
        other = place.open()
        assert other.read("weights/000001/manifest.json") == b"content"
        assert other.exists("weights/000001/manifest.json")
        assert other.digest("weights/000001/manifest.json") == ref
        assert other.list_keys() == ["weights/000001/manifest.json"]
        assert place.unfinished() == []

    def test_a_second_writer_is_told_and_changes_nothing(self, place: Place, store: ArtefactStore) -> None:
        store.create_exclusively("a", b"first")
        with pytest.raises(AlreadyExistsError, match=r"\ba was already committed"):
            place.open().create_exclusively("a", b"other")
        with pytest.raises(AlreadyExistsError):
            store.publish("", "a", in_chunks(b"other"))
        assert store.read("a") == b"first"
        assert place.unfinished() == []

    def test_the_same_content_again_counts_as_won(self, store: ArtefactStore) -> None:
        assert store.create_exclusively("a", b"same") == store.create_exclusively("a", b"same")
        assert store.publish("", "a", in_chunks(b"same")).digest == digest_bytes(b"same")

    @pytest.mark.parametrize("data", [b"", b"\0", b"x" * 100_000], ids=["empty", "zero", "long"])
    def test_any_content(self, store: ArtefactStore, data: bytes) -> None:
        store.create_exclusively("a", data)
        assert store.read("a") == data
        assert store.digest("a") == FileRef(path="a", bytes=len(data), digest=digest_bytes(data))
        store.verify("a", store.digest("a"))
        assert not wins(store, "a", data + b"!")

    def test_one_of_many_threads_wins(self, place: Place) -> None:
        stores = [place.open() for _ in range(2)]
        with ThreadPoolExecutor(8) as pool:
            for round_ in range(4):
                key = f"batches/{round_:06d}.json"
                won = list(pool.map(lambda i, key=key: wins(stores[i % 2], key, b"writer %d" % i), range(16)))
                assert won.count(True) == 1
                assert stores[0].read(key) == b"writer %d" % won.index(True)
        assert place.unfinished() == []

    def test_one_of_many_processes_wins(self, place: Place, store: ArtefactStore) -> None:
        keys = [f"incarnations/{i:06d}.json" for i in range(6)]
        start, results = MANY.Barrier(3), MANY.SimpleQueue()
        processes = [MANY.Process(target=race, args=(place.open, keys, i, start, results)) for i in range(3)]
        for process in processes:
            process.start()
        outcomes = [results.get() for _ in range(3 * len(keys))]
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        for key in keys:
            winners = [index for k, index, won in outcomes if k == key and won]
            assert len(winners) == 1
            assert store.read(key) == f"process {winners[0]} ".encode() * 50

    # -- landed, did not land, unknown ------------------------------------------------------------------------------------

    def test_a_lost_reply_is_not_a_lost_race(self, place: Place, store: ArtefactStore) -> None:
        with place.lost_reply() as trouble:
            store.create_exclusively("a", b"mine")
        assert trouble.fired == 1
        assert store.read("a") == b"mine"
        assert place.unfinished() == []

    def test_a_lost_reply_for_payload(self, place: Place, store: ArtefactStore) -> None:
        data = noise(6 << 20)
        with place.lost_reply() as trouble:
            ref = store.publish("weights/000001", by_digest, in_chunks(data))
        assert trouble.fired == 1
        store.verify(f"weights/000001/{ref.path}", ref)
        assert place.unfinished() == []

    def test_an_error_before_the_commit_leaves_nothing(self, place: Place, store: ArtefactStore) -> None:
        with place.no_commit() as trouble:
            with pytest.raises(StorageError) as caught:
                store.create_exclusively("a", b"mine")
            assert not isinstance(caught.value, AlreadyExistsError)
            assert "a" in caught.value.what and caught.value.mend
            with pytest.raises(StorageError):
                store.publish("weights", "torn.bin", in_chunks(noise(6 << 20)))
        assert trouble.fired >= 2
        assert store.list_keys() == [] and not store.exists("a")
        assert place.unfinished() == []
        store.create_exclusively("a", b"mine")  # and the same call again settles it
        assert store.read("a") == b"mine"

    def test_an_error_while_another_had_won(self, place: Place, store: ArtefactStore) -> None:
        store.create_exclusively("a", b"theirs")
        with place.no_commit() as trouble, pytest.raises(AlreadyExistsError):
            store.create_exclusively("a", b"mine")
        assert trouble.fired >= 1
        assert store.read("a") == b"theirs"

    def test_an_unknown_end_says_what_to_do(self) -> None:
        assert issubclass(OutcomeUnknownError, StorageError)
        assert not issubclass(OutcomeUnknownError, AlreadyExistsError)

    # -- the check before the commit ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [10, 6 << 20], ids=["small", "large"])
    def test_a_check_that_raises_stops_the_commit(self, place: Place, store: ArtefactStore, size: int) -> None:
        def fenced() -> None:
            raise FencedError("taken over")

        with pytest.raises(FencedError):
            store.publish("weights", by_digest, in_chunks(noise(size)), fenced)
        with pytest.raises(FencedError):
            store.create_exclusively("a", noise(size), fenced)
        assert store.list_keys() == []
        assert place.unfinished() == []

    def test_a_check_comes_after_the_content_and_before_the_name(self, place: Place, store: ArtefactStore) -> None:
        other, steps = place.open(), []

        def write(stream: BinaryIO) -> None:
            steps.append("written")
            stream.write(b"x")

        def check() -> None:
            steps.append(f"visible: {other.exists('d/a')}")

        store.publish("d", "a", write, check)
        assert steps == ["written", "visible: False"]
        assert other.exists("d/a")

    # -- payload --------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["payload.bin", by_digest], ids=["named", "by digest"])
    def test_large_payload(self, place: Place, store: ArtefactStore, name: str | Callable[[str], str]) -> None:
        data = noise(24 << 20)
        ref = store.publish("weights/000001", name, in_chunks(data))
        assert (ref.bytes, ref.digest) == (len(data), digest_bytes(data))
        assert ref.path == (name if isinstance(name, str) else name(ref.digest))
        key = f"weights/000001/{ref.path}"
        assert store.read(key) == data
        store.verify(key, ref)
        assert store.read_range(key, 4 << 20, 11 << 20) == data[4 << 20 : 15 << 20]
        assert store.publish("weights/000001", name, in_chunks(data)) == ref
        with pytest.raises(AlreadyExistsError):
            store.publish("weights/000001", ref.path, in_chunks(data[:-1] + b"?"))
        assert store.read(key) == data
        assert place.unfinished() == []

    @pytest.mark.parametrize("count", [(5 << 20) - 1, 5 << 20, (5 << 20) + 1, 10 << 20])
    def test_sizes_around_a_part(self, store: ArtefactStore, count: int) -> None:
        data = noise(count)
        store.verify("a", store.publish("", "a", in_chunks(data, count)))
        assert store.read("a") == data

    @pytest.mark.parametrize("size", [10, 12 << 20], ids=["small", "large"])
    @pytest.mark.parametrize("name", ["a", by_digest], ids=["named", "by digest"])
    def test_a_writer_that_raises_leaves_nothing(
        self, place: Place, store: ArtefactStore, size: int, name: str | Callable[[str], str]
    ) -> None:
        def torn(stream: BinaryIO) -> None:
            stream.write(noise(size))
            raise InputError("bad reward function")

        with pytest.raises(InputError, match="bad reward function"):
            store.publish("weights", name, torn)
        assert store.list_keys() == []
        assert place.unfinished() == []

    def test_a_killed_writer_leaves_nothing_visible(self, place: Place, store: ArtefactStore) -> None:
        under_way = MANY.Event()
        process = MANY.Process(target=write_until_killed, args=(place.open, under_way))
        process.start()
        assert under_way.wait(60)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert store.list_keys() == [] and not store.exists("weights/torn.bin")
        assert place.unfinished() != []
        assert store.sweep_unfinished() >= 1
        assert place.unfinished() == []
        assert store.sweep_unfinished("weights") == 0

    def test_a_name_made_from_the_digest_is_checked(self, place: Place, store: ArtefactStore) -> None:
        with pytest.raises(KeyRefusedError):
            store.publish("weights", lambda digest: f"../{digest}", in_chunks(b"x"))
        assert store.list_keys() == [] and place.unfinished() == []

    # -- reading -------------------------------------------------------------------------------------------------------------

    def test_ranges(self, store: ArtefactStore) -> None:
        data = noise(1000)
        store.create_exclusively("a", data)
        store.create_exclusively("empty", b"")
        for start, length in [
            (0, 1000),
            (0, 1),
            (999, 1),
            (999, 50),
            (10, 0),
            (1000, 5),
            (5000, 5),
            (300, 400),
            (0, 9 << 20),
        ]:
            assert store.read_range("a", start, length) == data[start : start + length], (start, length)
        assert store.read_range("empty", 0, 10) == b""
        for start, length in [(-1, 5), (5, -1)]:
            with pytest.raises(ValueError, match="negative"):
                store.read_range("a", start, length)

    def test_what_is_not_there(self, store: ArtefactStore) -> None:
        assert store.read("a/b") is None
        assert not store.exists("a/b")
        assert store.list_keys("a") == []
        ref = FileRef(path="b", bytes=1, digest=digest_bytes(b"x"))
        for ask in (
            lambda: store.read_range("a/b", 0, 5),
            lambda: store.read_range("a/b", 0, 0),
            lambda: store.digest("a/b"),
            lambda: store.quarantine("a/b", "why"),
        ):
            with pytest.raises(MissingArtefactError, match="a/b"):
                ask()
        for prove in (store.verify, store.read_verified):
            with pytest.raises(CorruptArtefactError, match="a/b"):
                prove("a/b", ref)
        store.delete("a/b")
        store.delete_tree("a")

    def test_a_directory_is_not_a_key(self, store: ArtefactStore) -> None:
        store.create_exclusively("a/b", b"x")
        assert not store.exists("a")
        assert store.exists("a/b") and not store.exists("a/b/c")

    @pytest.mark.parametrize("size", [500, 11 << 20], ids=["small", "large"])
    def test_damage_is_found(self, place: Place, store: ArtefactStore, size: int) -> None:
        data = noise(size)
        ref = store.publish("weights", "a", in_chunks(data))
        store.verify("weights/a", ref)
        assert store.read_verified("weights/a", ref) == data
        middle = size // 2
        for damaged in (
            data[:-1],
            data + b"\0",
            b"",
            bytes([data[0] ^ 1]) + data[1:],
            data[:middle] + bytes([data[middle] ^ 128]) + data[middle + 1 :],
            data[:-1] + bytes([data[-1] ^ 1]),
        ):
            place.damage("weights/a", damaged)
            for prove in (store.verify, store.read_verified):
                with pytest.raises(CorruptArtefactError, match="weights/a"):
                    prove("weights/a", ref)

    # -- keys ----------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "key",
        [
            "ü/ß x+y%20#?&=.bin",
            "日本/語'\"<>*:.json",
            "a b/c;d@e,f$!~()[]{}|^`",
            ".hidden",
            "...",
            "a..b",
            "%2e%2e/x",
            "x" * 115,
            "-rf",
        ],
    )
    def test_odd_keys(self, place: Place, store: ArtefactStore, key: str) -> None:
        data = key.encode()
        store.create_exclusively(key, data)
        assert place.open().read(key) == data
        assert store.list_keys() == [key]
        assert not wins(store, key, b"other")
        kept = store.quarantine(key, "odd")
        assert store.read(kept) == data and not store.exists(key)
        store.publish(key, by_digest, in_chunks(data))
        assert len(store.list_keys(key)) == 1
        store.delete_tree(key)
        assert store.list_keys() == []

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a/./b", "a//b", "a/", "./a", "a\\..\\b", "a\0b", "a\nb",
         "\ud800", "e\u0301", ".tmp-x", "a/.tmp-x", "x" * 116, "/".join(["x" * 100] * 9), "a\u202eb"],
    )  # fmt: skip
    def test_keys_that_lead_out_or_differ_between_stores_are_refused(
        self, place: Place, store: ArtefactStore, key: str
    ) -> None:
        ref = FileRef(path="a", bytes=1, digest=digest_bytes(b"x"))
        calls: list[Callable[[], object]] = [
            lambda: store.create_exclusively(key, b"x"),
            lambda: store.publish("", key, in_chunks(b"x")),
            lambda: store.read(key),
            lambda: store.read_range(key, 0, 1),
            lambda: store.read_verified(key, ref),
            lambda: store.digest(key),
            lambda: store.verify(key, ref),
            lambda: store.exists(key),
            lambda: store.delete(key),
            lambda: store.delete_tree(key),
            lambda: store.quarantine(key, "why"),
        ]
        if key:  # "" is the whole store
            calls += [lambda: store.list_keys(key), lambda: store.publish(key, "a", in_chunks(b"x"))]
        for call in calls:
            with pytest.raises(KeyRefusedError, match="what to do"):
                call()
        assert store.list_keys() == [] and place.unfinished() == []

    def test_a_file_name_has_no_directory(self, store: ArtefactStore) -> None:
        with pytest.raises(KeyRefusedError):
            store.publish("a", "b/c", in_chunks(b"x"))

    # -- listing, deleting, quarantine -----------------------------------------------------------------------------------------

    def test_listing(self, store: ArtefactStore) -> None:
        keys = [
            "run.json",
            "weights/000001/a.bin",
            "weights/000001/manifest.json",
            "weights/000010/manifest.json",
            "weightsx/a",
        ]
        for key in reversed(keys):
            store.create_exclusively(key, key.encode())
        assert store.list_keys() == keys
        assert store.list_keys("weights") == keys[1:4]
        assert store.list_keys("weights/000001") == keys[1:3]
        assert store.list_keys("weights/0000") == []  # a directory, not the beginning of a name
        store.delete("weights/000001/a.bin")
        assert store.list_keys("weights") == keys[2:4]

    def test_a_deleted_key_can_be_created_anew(self, store: ArtefactStore) -> None:
        store.create_exclusively("a", b"first")
        store.delete("a")
        assert store.read("a") is None
        store.create_exclusively("a", b"second")
        assert store.read("a") == b"second"

    def test_a_tree_goes_manifests_first(self, place: Place, store: ArtefactStore) -> None:
        for version in ("000001", "000002"):
            for name in ("a.bin", "shards/z.bin", "manifest.json", "zz.bin"):
                store.create_exclusively(f"weights/{version}/{name}", b"x")
        store.create_exclusively("weights2/manifest.json", b"x")
        with place.removals() as removed:
            store.delete_tree("weights/000001")
        assert removed[0] == "weights/000001/manifest.json"
        assert sorted(removed)[0] == "weights/000001/a.bin" and len(removed) == 4
        assert len(store.list_keys("weights")) == 4
        with place.removals() as removed:
            store.delete_tree("weights")
        payload = [removed.index(f"weights/000002/{name}") for name in ("a.bin", "shards/z.bin", "zz.bin")]
        assert removed.index("weights/000002/manifest.json") < min(payload)
        assert store.list_keys() == ["weights2/manifest.json"]

    def test_quarantine_keeps_content_and_reason(self, store: ArtefactStore) -> None:
        store.create_exclusively("weights/000001/a.bin", b"content")
        store.create_exclusively("weights/000002/a.bin", b"other")
        kept = store.quarantine("weights/000001/a.bin", "digest says: no · nein")
        assert kept.startswith("quarantine/000001.a.bin.")
        assert store.read(kept) == b"content"
        assert store.read(f"{kept}.reason.txt") == "digest says: no · nein\n".encode()
        assert not store.exists("weights/000001/a.bin")
        assert store.list_keys() == ["weights/000002/a.bin"]
        assert store.list_keys("quarantine") == [kept, f"{kept}.reason.txt"]
        store.create_exclusively("weights/000001/a.bin", b"content")
        again = store.quarantine("weights/000001/a.bin", "once more")
        assert again != kept and store.read(kept) == b"content"

    def test_quarantine_of_long_names(self, store: ArtefactStore) -> None:
        key = f"{'d' * 115}/{'f' * 115}"
        store.create_exclusively(key, b"x")
        kept = store.quarantine(key, "why")
        assert (store.read(kept), store.read(f"{kept}.reason.txt")) == (b"x", b"why\n")
