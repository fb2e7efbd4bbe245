"""The conformance suite over a real S3 server, and what only a server and a wire can do wrong."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from against_model import check_against_model
from conformance import Conformance, Opener, by_digest, in_chunks, noise
from object_server import Environ, Server, Trouble, Wire, is_commit, is_complete, is_probe

from milesbatch.errors import (
    CorruptArtefactError,
    FencedError,
    InputError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
)
from milesbatch.records import digest_bytes
from milesbatch.store.object_requests import Retries
from milesbatch.store.object_store import ObjectOptions, ObjectStore
from milesbatch.store.port import AlreadyExistsError, ArtefactStore, OutcomeUnknownError

PART = 5 << 20
OPTIONS = ObjectOptions(part_bytes=PART, retries=Retries(3, 0.01, 0.02), connect_timeout_s=2.0, read_timeout_s=10.0)
_count = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    filesystem = fsspec.filesystem("s3", **server.client, skip_instance_cache=True)
    filesystem.call_s3("create_bucket", Bucket="bucket")
    yield server
    server.stop()


@dataclass
class Bucket:
    """A new prefix of the bucket."""

    server: Server
    url: str
    options: ObjectOptions = OPTIONS

    @property
    def wire(self) -> Wire:
        return self.server.wire

    @property
    def open(self) -> Opener:
        return partial(ObjectStore, self.url, self.server.client, self.options)

    def lost_reply(self) -> contextlib.AbstractContextManager[Trouble]:
        return self.wire.trouble("cut_after", is_commit)

    def no_commit(self) -> contextlib.AbstractContextManager[Trouble]:
        return self.wire.trouble("cut_before", is_commit, 1_000_000)

    @contextlib.contextmanager
    def removals(self) -> Iterator[list[str]]:
        keys: list[str] = []
        before = len(self.wire.requests)
        yield keys
        start = f"DELETE /{self.url.removeprefix('s3://')}/"
        keys += [r.removeprefix(start)[:-1] for r in self.wire.requests[before:] if r.startswith(start)]

    def damage(self, key: str, data: bytes) -> None:
        self._call("put_object", Key=self._full(key), Body=data)

    def unfinished(self) -> list[str]:
        prefix = self._full("")
        uploads = self._call("list_multipart_uploads", Prefix=prefix).get("Uploads", [])
        objects = self._call("list_objects_v2", Prefix=prefix).get("Contents", [])
        return [u["Key"] for u in uploads] + [o["Key"] for o in objects if ".tmp-" in o["Key"]]

    def _full(self, key: str) -> str:
        return f"{self.url.removeprefix('s3://bucket/')}/{key}"

    def _call(self, operation: str, **arguments: Any) -> Any:
        return fsspec.filesystem("s3", **self.server.client).call_s3(operation, Bucket="bucket", **arguments)


@pytest.fixture
def place(server: Server) -> Bucket:
    server.wire.requests.clear()
    return Bucket(server, f"s3://bucket/runs/{next(_count)}")


class TestObject(Conformance):
    """All of the suite."""


def test_random_operations_against_a_model(server: Server) -> None:
    def new_place() -> Opener:
        return Bucket(server, f"s3://bucket/model/{next(_count)}").open

    assert check_against_model(new_place, examples=8, steps=25) > 100


def test_the_whole_bucket_can_be_a_store(server: Server) -> None:
    filesystem = fsspec.filesystem("s3", **server.client, skip_instance_cache=True)
    filesystem.call_s3("create_bucket", Bucket="whole")
    store = ObjectStore("s3://whole", server.client, OPTIONS)
    store.create_exclusively("a/b", b"x")
    assert store.list_keys() == ["a/b"] and store.read("a/b") == b"x"
    store.quarantine("a/b", "why")
    assert store.list_keys() == [] and store.sweep_unfinished() == 0


# -- what the server can do is proven, not believed ----------------------------------------------------------------------


def test_moto_refuses_a_second_put_and_a_second_completion(place: Bucket) -> None:
    """The premise of this file: the server that the suite runs against honours both conditions."""
    place.open().publish("", "large", in_chunks(noise(PART + 1)))
    put = [r for r in place.wire.requests if r.startswith("PUT") and is_probe({"PATH_INFO": r})]
    assert len(put) == 4  # two puts; then one put and one part, and a completion that was refused
    with pytest.raises(AlreadyExistsError):
        place.open().publish("", "large", in_chunks(noise(PART + 1, seed=1)))


def test_a_server_that_ignores_the_condition_is_refused(place: Bucket) -> None:
    place.wire.ignored = lambda environ: True
    try:
        store = place.open()
        with pytest.raises(StorageError, match=r"ignores or does not know If-None-Match") as caught:
            store.create_exclusively("a", b"x")
        assert "or a directory" in caught.value.mend
        with pytest.raises(StorageError, match="If-None-Match"):
            store.publish("", by_digest, in_chunks(b"x"))
    finally:
        place.wire.ignored = lambda environ: False
    assert store.list_keys() == [] and place.unfinished() == []
    with pytest.raises(StorageError):  # found out once
        store.create_exclusively("a", b"x")


def test_a_server_that_does_not_know_the_condition_is_refused(place: Bucket) -> None:
    with place.wire.trouble("501_before", is_probe, 1000), pytest.raises(StorageError, match="does not know"):
        place.open().create_exclusively("a", b"x")


def test_without_conditional_completion_large_payload_needs_a_digest_in_its_name(place: Bucket) -> None:
    place.wire.ignored = is_complete
    try:
        store, data = place.open(), noise(PART + 5)
        with pytest.raises(StorageError, match="multipart") as caught:
            store.publish("weights", "plain.bin", in_chunks(data))
        assert "digest" in caught.value.mend
        assert place.unfinished() == []
        ref = store.publish("weights", by_digest, in_chunks(data))
        store.verify(f"weights/{ref.path}", ref)
        assert store.publish("weights", by_digest, in_chunks(data)) == ref
        place.damage(f"weights/{ref.path}", b"something else")
        with pytest.raises(AlreadyExistsError):
            store.publish("weights", by_digest, in_chunks(data))
        store.publish("weights", "small.bin", in_chunks(b"one part"))
        assert place.unfinished() == []
    finally:
        place.wire.ignored = lambda environ: False


@pytest.mark.parametrize("url", ["memory://runs", "file:///tmp/runs", "gs://bucket/run", "https://host/run"])
def test_filesystems_without_exclusive_creation_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="no exclusive creation that is atomic") as caught:
        ObjectStore(url)
    assert url in caught.value.what and "s3://" in caught.value.mend


@pytest.mark.parametrize(
    ("url", "what"), [("s3://", "not the URL"), ("bucket/run", "not the URL"), ("s3://b/../x", "not a key")]
)
def test_bad_urls(url: str, what: str) -> None:
    with pytest.raises((InputError, StorageError), match=what):
        ObjectStore(url)


def test_parts_that_are_too_small_are_refused() -> None:
    with pytest.raises(InputError, match="part_bytes"):
        ObjectStore("s3://bucket/run", options=ObjectOptions(part_bytes=1000))


def test_readers_need_no_right_to_write(place: Bucket) -> None:
    place.open().create_exclusively("a", b"x")
    reader = place.open()
    place.wire.requests.clear()
    assert reader.read("a") == b"x" and reader.exists("a") and reader.list_keys() == ["a"]
    assert {request.split()[0] for request in place.wire.requests} == {"GET"}


# -- every end of a request ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action",
    ["cut_after", "reset_after", "500_after", "cut_before", "reset_before", "500_before", "429_before", "409_before"],
)
@pytest.mark.parametrize("size", [10, PART + 1], ids=["put", "multipart"])
def test_one_bad_end_of_a_commit_is_made_good(place: Bucket, action: str, size: int) -> None:
    store = place.open()
    with place.wire.trouble(action, is_commit) as trouble:
        store.publish("", "a", in_chunks(noise(size)))
    assert trouble.fired == 1
    assert store.read("a") == noise(size)
    assert place.unfinished() == []


def test_silence_after_the_commit_counts_as_a_lost_reply(place: Bucket) -> None:
    store = replace(place, options=replace(OPTIONS, read_timeout_s=0.5)).open()
    with place.wire.trouble("silent_after", is_commit) as trouble:
        store.create_exclusively("a", b"mine")
    assert trouble.fired == 1 and store.read("a") == b"mine"


@pytest.mark.parametrize("action", ["cut_before", "reset_before", "500_before"])
def test_an_end_that_stays_unknown_is_reported_as_unknown(place: Bucket, action: str) -> None:
    store = place.open()
    trouble = place.wire.trouble(action, is_commit, 1000)
    with trouble as fired, pytest.raises(OutcomeUnknownError, match="a was committed is not known"):
        store.create_exclusively("a", b"mine")
    assert 3 <= fired.fired <= 6  # aiohttp repeats a PUT once by itself when a kept connection was closed
    store.create_exclusively("a", b"mine")


def test_a_lost_reply_and_then_a_blind_look_is_unknown(place: Bucket) -> None:
    """It landed, but nobody could see that: neither success nor a lost race may be claimed."""
    store = place.open()
    store.create_exclusively("warm", b"")
    with (
        place.wire.trouble("cut_after", is_commit),
        place.wire.trouble("500_before", lambda e: e["REQUEST_METHOD"] == "GET", 1000) as blind,
        pytest.raises(OutcomeUnknownError),
    ):
        store.create_exclusively("a", b"mine")
    assert blind.fired == 3
    assert store.read("a") == b"mine"


def test_a_refusal_is_no_unknown_end_and_is_not_repeated(place: Bucket) -> None:
    store = place.open()
    store.create_exclusively("warm", b"")
    for status, kind in [("403", StorageReadOnlyError), ("507", StorageError), ("400", StorageError)]:
        with place.wire.trouble(f"{status}_before", is_commit, 1000) as trouble, pytest.raises(kind) as caught:
            store.create_exclusively("a", b"mine")
        if status != "507":  # a server error: never taken for a refusal
            assert trouble.fired == 1 and not isinstance(caught.value, OutcomeUnknownError)
    assert not store.exists("a")


def test_a_server_that_is_not_there_did_not_commit(server: Server) -> None:
    client = {**server.client, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"}}
    store = ObjectStore("s3://bucket/run", client, OPTIONS)
    for call in (lambda: store.create_exclusively("a", b"x"), lambda: store.exists("a"), lambda: store.list_keys()):
        with pytest.raises(StorageError, match=r"s3://bucket/run.*Could not connect") as caught:
            call()
        assert not isinstance(caught.value, OutcomeUnknownError)


def test_a_server_that_went_away_before_the_commit_did_not_commit(server: Server) -> None:
    client = {**server.client, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"}}
    store = ObjectStore("s3://bucket/run", client, OPTIONS)
    store._conditions._put = True  # as found out before
    with pytest.raises(StorageError, match=r"s3://bucket/run/a.*Could not connect") as caught:
        store.create_exclusively("a", b"x")
    assert not isinstance(caught.value, OutcomeUnknownError)


def test_no_bucket(server: Server) -> None:
    store = ObjectStore("s3://nothing-here/run", server.client, OPTIONS)
    for call in (lambda: store.create_exclusively("a", b"x"), lambda: store.exists("a"), lambda: store.read("a")):
        with pytest.raises(StorageError, match="no such bucket"):
            call()


def test_the_fence_is_asked_again_before_a_commit_is_repeated(place: Bucket) -> None:
    asked = []

    def fence() -> None:
        asked.append(len(asked))
        if len(asked) == 2:
            raise FencedError("taken over while the request was on its way")

    store = place.open()
    with place.wire.trouble("500_before", is_commit), pytest.raises(FencedError):
        store.create_exclusively("a", b"x", fence)
    assert asked == [0, 1] and not store.exists("a")


@pytest.mark.parametrize("action", ["503_before", "cut_before", "500_after"])
def test_parts_and_reads_are_repeated(place: Bucket, action: str) -> None:
    store, data = place.open(), noise(3 * PART)
    with place.wire.trouble(action, lambda e: "partNumber=2" in e["QUERY_STRING"], 2) as trouble:
        store.publish("", "a", in_chunks(data))
    assert trouble.fired == 2
    with place.wire.trouble(action, lambda e: e["REQUEST_METHOD"] == "GET", 2) as trouble:
        assert store.read("a") == data
    assert trouble.fired == 2


def test_a_part_that_cannot_be_sent_ends_the_upload(place: Bucket) -> None:
    """Also when the writer of the content swallows the error: an object with a hole is never committed."""

    def careless(stream: Any) -> None:
        for start in range(0, 6 * PART, PART):
            with contextlib.suppress(StorageError):
                stream.write(noise(PART, seed=start))

    store = place.open()
    with place.wire.trouble("403_before", lambda e: "partNumber=1&" in e["QUERY_STRING"] + "&", 1000) as trouble:
        with pytest.raises(StorageReadOnlyError):
            store.publish("", "a", in_chunks(noise(3 * PART)))
        with pytest.raises(StorageReadOnlyError):
            store.publish("", "a", careless)
    assert trouble.fired >= 2
    assert store.list_keys() == [] and place.unfinished() == []


def test_quota(place: Bucket) -> None:
    from milesbatch.store.object_requests import RequestError

    error = RequestError("put_object", "403 QuotaExceeded", status=403, code="QuotaExceeded").as_storage_error(
        "s3://b/a"
    )
    assert isinstance(error, StorageFullError) and "s3://b/a" in error.what


# -- reading, quarantine, cache ----------------------------------------------------------------------------------------------


def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(place: Bucket) -> None:
    store = place.open()
    store.publish("", "a", in_chunks(noise(3 * PART)))
    pieces = store._objects.pieces("a")  # type: ignore[attr-defined]
    next(pieces)
    place.damage("a", noise(3 * PART, seed=1))
    with pytest.raises(StorageError, match="412"):
        list(pieces)


@pytest.mark.parametrize("limit", [0, 5 << 30], ids=["by way of this process", "on the server"])
def test_quarantine_of_large_objects(place: Bucket, limit: int) -> None:
    store = replace(place, options=replace(OPTIONS, copy_limit_bytes=limit)).open()
    data = noise(2 * PART)
    store.publish("weights", "a", in_chunks(data))
    kept = store.quarantine("weights/a", "why")
    assert store.read(kept) == data and not store.exists("weights/a")


def is_copy(environ: Environ) -> bool:
    return "HTTP_X_AMZ_COPY_SOURCE" in environ


def test_quarantine_keeps_the_source_until_the_copy_is_proven(place: Bucket) -> None:
    store = place.open()
    store.create_exclusively("weights/a", b"content")
    with place.wire.trouble("403_before", is_copy) as trouble, pytest.raises(StorageError):
        store.quarantine("weights/a", "why")
    assert trouble.fired == 1 and store.read("weights/a") == b"content"
    damaged: list[str] = []

    def damage_the_copy(environ: Environ) -> bool:
        if environ["REQUEST_METHOD"] != "GET" or "/quarantine/" not in environ["PATH_INFO"] or damaged:
            return False
        damaged.append(environ["PATH_INFO"].partition(place.url.removeprefix("s3://bucket/") + "/")[2])
        place.damage(damaged[0], b"conten?")
        return False

    with place.wire.trouble("503_before", damage_the_copy), pytest.raises(CorruptArtefactError, match="quarantine"):
        store.quarantine("weights/a", "why")
    assert len(damaged) == 1 and store.read("weights/a") == b"content"


def test_a_stale_listing_does_not_save_a_manifest(place: Bucket) -> None:
    store = place.open()
    for name in ("manifest.json", "a.bin"):
        store.create_exclusively(f"weights/000001/{name}", b"x")
    hidden: Callable[[str], Iterator[str]] = lambda prefix: iter(["weights/000001/a.bin"])  # noqa: E731
    objects = store._objects  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(objects), "below", lambda self, prefix: hidden(prefix))
        store.delete_tree("weights/000001")
    assert store.list_keys() == []


def cached(place: Bucket, directory: Path, limit: int = 1 << 20) -> ArtefactStore:
    return replace(place, options=replace(OPTIONS, cache=directory, cache_limit_bytes=limit)).open()


def test_the_cache_is_used_and_never_trusted(place: Bucket, tmp_path: Path) -> None:
    ref = place.open().create_exclusively("a", b"content")
    store = cached(place, tmp_path / "cache")
    assert store.read_verified("a", ref) == b"content"
    place.wire.requests.clear()
    assert store.read_verified("a", ref) == b"content"
    assert cached(place, tmp_path / "cache").read_verified("elsewhere", ref) == b"content"  # by digest, not by key
    assert place.wire.requests == []
    (copy,) = (tmp_path / "cache").iterdir()
    assert copy.name == digest_bytes(b"content").replace(":", "-")
    copy.write_bytes(b"conten?")
    assert store.read_verified("a", ref) == b"content"
    assert len(place.wire.requests) == 1 and copy.read_bytes() == b"content"
    place.damage("b", b"conten?")
    copy.unlink()
    with pytest.raises(CorruptArtefactError):
        store.read_verified("b", ref)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_stays_within_its_limit(place: Bucket, tmp_path: Path) -> None:
    store, directory = cached(place, tmp_path / "cache", limit=2500), tmp_path / "cache"
    refs = {f"k{i}": store.create_exclusively(f"k{i}", noise(1000, seed=i)) for i in range(5)}
    refs["big"] = store.create_exclusively("big", noise(3000))
    for key, ref in refs.items():
        assert len(store.read_verified(key, ref)) == ref.bytes
        assert sum(path.stat().st_size for path in directory.iterdir()) <= 2500
    assert len(list(directory.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_download(place: Bucket, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    store = cached(place, tmp_path / "cache")
    ref = store.create_exclusively("a", b"content")
    assert store.read_verified("a", ref) == b"content"


def test_a_spool_without_a_place_is_named(place: Bucket, tmp_path: Path) -> None:
    store = replace(place, options=replace(OPTIONS, spool=tmp_path / "missing")).open()
    with pytest.raises(StorageError, match="missing"):
        store.publish("", by_digest, in_chunks(b"x"))


def test_the_suite_runs_against_the_wire(place: Bucket) -> None:
    """A trouble that matches nothing must not look as if it had fired."""
    with place.wire.trouble("cut_after", lambda environ: False) as trouble:
        place.open().create_exclusively("a", b"x")
    assert trouble.fired == 0
    assert sum(is_commit({"REQUEST_METHOD": "PUT", "HTTP_IF_NONE_MATCH": "*", "PATH_INFO": r, "QUERY_STRING": ""})
               for r in place.wire.requests if r.startswith("PUT")) == 1  # fmt: skip
