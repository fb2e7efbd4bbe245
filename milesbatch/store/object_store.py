"""The artefact store over an S3-like object store: commits are conditional puts (``If-None-Match: *``).

Owns what the keys of one bucket and prefix mean and what to conclude from the end of a request. Never renames (there is
no rename) and never overwrites. Invariant: an end of a commit that is not known leads to a look at what is there and a
comparison of contents before anything is repeated or reported. The page behind it is ``docs/storage.md``.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from milesbatch.errors import CorruptArtefactError, InputError, StorageError
from milesbatch.records import FileRef, digest_bytes
from milesbatch.store.durable import TEMPORARY_PREFIX, storage_error
from milesbatch.store.object_cache import VerifiedCache
from milesbatch.store.object_condition import ConditionalPuts
from milesbatch.store.object_reads import Objects
from milesbatch.store.object_requests import Reply, RequestError, Requests, Retries, in_order, open_filesystem
from milesbatch.store.object_upload import PartStream
from milesbatch.store.port import (
    MANIFEST,
    QUARANTINE,
    AlreadyExistsError,
    Check,
    KeyRefusedError,
    MissingArtefactError,
    OutcomeUnknownError,
    Write,
    check_directory,
    check_key,
    check_name,
    check_range,
    join,
)

_SMALLEST_PART_BYTES = 5 << 20  # of S3


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """How an object store is used; nothing here changes what is true of it."""

    part_bytes: int = 16 << 20
    """Size of a part of an upload and of a range of a parallel read; at least 5 MiB. Each thread holds one in memory."""
    parallel: int = 4
    """Parts or ranges on their way at a time."""
    retries: Retries = field(default_factory=Retries)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """Silence after which an answer counts as lost."""
    copy_limit_bytes: int = 5 << 30
    """What the server copies at once (S3: 5 GiB); larger content is quarantined by way of this process."""
    cache: Path | None = None
    """Directory for verified copies (:meth:`ObjectStore.read_verified`)."""
    cache_limit_bytes: int = 20 << 30
    spool: Path | None = None
    """Directory that holds a payload whose name depends on its digest until that is known; None: the system's."""


class ObjectStore:
    """An :class:`~milesbatch.store.port.ArtefactStore` at ``s3://bucket/prefix``; see there for every promise.

    Relied on: the server creates atomically with ``If-None-Match: *`` and answers reads of single keys from the newest
    state. Safe to use from several threads, processes and machines at once; open another after a fork.
    """

    def __init__(self, url: str, client: Mapping[str, Any] | None = None, options: ObjectOptions | None = None) -> None:
        """``client``: arguments of ``s3fs.S3FileSystem`` (endpoint, credentials); without them, the SDK's own search.

        Raises:
            InputError: not the URL of a store with exclusive creation, a package is missing, or an option is wrong.
        """
        self._options = options or ObjectOptions()
        if self._options.part_bytes < _SMALLEST_PART_BYTES:
            raise InputError(
                f"part_bytes of an object store is {self._options.part_bytes:,}",
                mend=f"give at least {_SMALLEST_PART_BYTES:,}: object stores refuse smaller parts",
            )
        protocol, separator, place = url.rstrip("/").partition("://")
        bucket, _, self._root = place.partition("/")
        if not separator or (protocol.startswith("s3") and not bucket):
            raise InputError(f"{url!r} is not the URL of an object store", mend="write s3://bucket/prefix")
        timeouts = {"connect_timeout": self._options.connect_timeout_s, "read_timeout": self._options.read_timeout_s}
        filesystem = open_filesystem(protocol, url, client or {}, timeouts)
        check_directory(self._root)
        self._url = url.rstrip("/")
        self._requests = Requests(filesystem, bucket, self._options.retries)
        # After an unknown end of a commit one look per attempt is enough: the attempts themselves are repeated.
        self._glances = Requests(filesystem, bucket, replace(self._options.retries, attempts=1))
        self._objects = Objects(self._requests, self._root, self._url, self._options.part_bytes, self._options.parallel)
        self._conditions = ConditionalPuts(self._requests, self._root, self._url)
        cache = self._options.cache
        self._cache = None if cache is None else VerifiedCache(cache, self._options.cache_limit_bytes)

    @property
    def url(self) -> str:
        return self._url

    # -- commits ------------------------------------------------------------------------------------------------------

    def create_exclusively(self, key: str, data: bytes, before_commit: Check | None = None) -> FileRef:
        return self._upload(check_key(key), lambda stream: stream.write(data), before_commit, carries_digest=False)

    def publish(
        self, directory: str, name: str | Callable[[str], str], write: Write, before_commit: Check | None = None
    ) -> FileRef:
        check_directory(directory)
        if isinstance(name, str):
            return self._upload(join(directory, check_name(name)), write, before_commit, carries_digest=False)
        place = self._options.spool or Path(tempfile.gettempdir())
        try:
            with tempfile.TemporaryFile(dir=place) as spool:
                write(cast(BinaryIO, spool))
                digest = _digest_of(cast(BinaryIO, spool))
                final = check_name(name(digest))
                carries = digest.removeprefix("xxh128:")[:16] in final
                spool.seek(0)
                return self._upload(
                    join(directory, final),
                    lambda stream: shutil.copyfileobj(spool, stream, 1 << 20),
                    before_commit,
                    carries_digest=carries,
                )
        except OSError as error:
            raise storage_error(place, error) from error

    def _upload(self, key: str, write: Write, before_commit: Check | None, *, carries_digest: bool) -> FileRef:
        place = self._objects.place(key)
        self._conditions.require()
        stream = PartStream(
            self._requests,
            self._objects.full(key),
            place,
            part_bytes=self._options.part_bytes,
            parallel=self._options.parallel,
            multipart_condition=lambda: self._conditions.for_multipart(name_carries_digest=carries_digest, place=place),
        )
        was_used = False
        try:
            write(cast(BinaryIO, stream))
            written, send, is_conditional = stream.finish()
            ref = written.model_copy(update={"path": key.rpartition("/")[2]})
            if is_conditional or not self._settled(key, ref):
                was_used = self._commit(key, ref, send, before_commit)
        finally:
            # To abort what was completed after all, with the answer lost, changes nothing.
            (stream.end if was_used else stream.abort)()
        return ref

    def _commit(self, key: str, ref: FileRef, send: Callable[[], Reply], before_commit: Check | None) -> bool:
        """Make the committing request until its end is known, or the attempts are used up; the content is there then.

        Returns whether the request itself said so, or a look at what is there.
        """
        last = unknown = None
        for _ in self._options.retries.each_attempt():
            if before_commit is not None:
                before_commit()
            try:
                send()
                return True
            except RequestError as error:
                last = error
            unknown = last if last.is_unknown else unknown
            # "Exists" may be our own request whose answer was lost; so may "no such upload".
            if unknown is not None or last.is_condition or last.code == "NoSuchUpload":
                try:
                    if self._settled(key, ref):
                        return False
                except AlreadyExistsError:
                    raise
                except StorageError:
                    unknown = unknown or last
            if not (last.may_repeat or last.is_condition):
                break
        assert last is not None
        if unknown is None:
            raise last.as_storage_error(self._objects.place(key)) from last
        raise OutcomeUnknownError(
            f"whether {self._objects.place(key)} was committed is not known ({unknown})",
            mend="check the object store, then give the same command again: it finds out",
        ) from last

    def _settled(self, key: str, ref: FileRef) -> bool:
        """Whether ``key`` holds what ``ref`` says; False when there is nothing.

        Raises:
            AlreadyExistsError: other content is there.
            StorageError: looking gave no answer.
        """
        hasher, count = xxhash.xxh3_128(), 0
        try:
            for piece in self._objects.pieces(key, self._glances):
                hasher.update(piece)
                count += len(piece)
        except MissingArtefactError:
            return False
        if (count, "xxh128:" + hasher.hexdigest()) != (ref.bytes, ref.digest):
            raise AlreadyExistsError(f"{self._objects.place(key)} was already committed by another writer")
        return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        try:
            return b"".join(self._objects.pieces(key))
        except MissingArtefactError:
            return None

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        return self._objects.part(key, start, start + length)

    def read_verified(self, key: str, ref: FileRef) -> bytes:
        check_key(key)
        data = self._cache.get(ref) if self._cache is not None else None
        if data is not None:
            return data
        data = self.read(key)
        found = "nothing" if data is None else digest_bytes(data)
        if data is None or found != ref.digest:
            raise self._corrupt(key, ref, found)
        if self._cache is not None:
            self._cache.put(ref, data)
        return data

    def digest(self, key: str) -> FileRef:
        hasher, count = xxhash.xxh3_128(), 0
        for piece in self._objects.pieces(key):
            hasher.update(piece)
            count += len(piece)
        return FileRef(path=key.rpartition("/")[2], bytes=count, digest="xxh128:" + hasher.hexdigest())

    def verify(self, key: str, ref: FileRef) -> None:
        try:
            size, _ = self._objects.size(key)
            found = self.digest(key).digest if size == ref.bytes else f"{size} bytes"
        except MissingArtefactError:
            found = "nothing"
        if found != ref.digest:
            raise self._corrupt(key, ref, found)

    def exists(self, key: str) -> bool:
        try:
            self._objects.size(key)
        except MissingArtefactError:
            return False
        return True

    def list_keys(self, prefix: str = "") -> list[str]:
        keys = []
        for key in self._objects.below(check_directory(prefix)):
            try:
                check_key(key)  # also leaves out what others put there, such as "directory/" objects
            except KeyRefusedError:
                continue
            if prefix or not key.startswith(f"{QUARANTINE}/"):
                keys.append(key)
        return sorted(keys)

    # -- taking away --------------------------------------------------------------------------------------------------

    def delete(self, key: str) -> None:
        self._delete(check_key(key))

    def delete_tree(self, prefix: str) -> None:
        own = join(check_key(prefix), MANIFEST)
        keys = sorted(self._objects.below(prefix))
        manifests = [own, *(key for key in keys if key.endswith(f"/{MANIFEST}") and key != own)]
        for key in manifests:  # its own by name: a stale listing may not show it
            self._delete(key)
        payload = [key for key in keys if key not in set(manifests)]
        work = (partial(self._delete, key) for key in payload)
        for _ in in_order(work, self._options.parallel):
            pass

    def quarantine(self, key: str, reason: str) -> str:
        original = self.digest(key)
        directory = key.rpartition("/")[0].rpartition("/")[2]
        kept = f"{QUARANTINE}/{directory or 'run'}.{original.path}.{secrets.token_hex(4)}"
        self._copy(key, kept, original.bytes)
        copied = self.digest(kept)
        if (copied.bytes, copied.digest) != (original.bytes, original.digest):
            raise self._corrupt(kept, original, copied.digest)
        self.create_exclusively(f"{kept}.reason.txt", reason.encode() + b"\n")
        self._delete(key)
        return kept

    def sweep_unfinished(self, prefix: str = "") -> int:
        below = self._objects.full(check_directory(prefix)) + "/" if self._objects.full(prefix) else ""
        count = 0
        for reply in self._objects.pages("list_multipart_uploads", below, {"KeyMarker": "NextKeyMarker"}):
            for upload in reply.get("Uploads", ()):
                self._do("abort_multipart_upload", upload["Key"], UploadId=upload["UploadId"])
                count += 1
        for key in self._objects.below(prefix):
            if key.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
                self._delete(key)
                count += 1
        return count

    # -- requests -----------------------------------------------------------------------------------------------------

    def _corrupt(self, key: str, ref: FileRef, found: str) -> CorruptArtefactError:
        return CorruptArtefactError(
            f"{self._objects.place(key)} is damaged or missing: expected {ref.bytes} bytes, {ref.digest}, found {found}",
            mend="run `milesbatch audit` on the run; this object must not be used",
        )

    def _do(self, operation: str, full_key: str, **arguments: Any) -> Reply:
        """A request that is safe to repeat."""
        try:
            return self._requests.repeated(operation, Key=full_key, **arguments)
        except RequestError as error:
            raise error.as_storage_error(f"s3://{self._requests.bucket}/{full_key}") from error

    def _delete(self, key: str) -> None:
        self._do("delete_object", self._objects.full(key))

    def _copy(self, source: str, target: str, size: int) -> None:
        if size <= self._options.copy_limit_bytes:
            origin = {"Bucket": self._requests.bucket, "Key": self._objects.full(source)}
            self._do("copy_object", self._objects.full(target), CopySource=origin)
        else:
            directory, _, name = target.rpartition("/")
            self.publish(directory, name, lambda stream: stream.writelines(self._objects.pieces(source)))


def _digest_of(stream: BinaryIO) -> str:
    stream.seek(0)
    hasher = xxhash.xxh3_128()
    while chunk := stream.read(1 << 20):
        hasher.update(chunk)
    return "xxh128:" + hasher.hexdigest()
