"""The way of content into an object store, before its commit: one part in memory, or many parts sent while they come.

Owns the parts of one upload. Never commits: :meth:`PartStream.finish` gives the one request that does. Invariant: nothing
is visible before that request, and after :meth:`PartStream.abort` nothing of the upload is left (unless the store does not
answer: then its parts stay for the sweep).
"""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import xxhash

from milesbatch.errors import StorageError
from milesbatch.records import FileRef
from milesbatch.store.object_requests import Reply, RequestError, Requests

_MOST_PARTS = 10_000  # of S3


class PartStream(io.RawIOBase):
    """A stream to write to: up to ``part_bytes`` stay in memory, more is sent in parts of that size, several at a time."""

    def __init__(
        self,
        requests: Requests,
        key: str,
        place: str,
        *,
        part_bytes: int,
        parallel: int,
        multipart_condition: Callable[[], dict[str, str]],
    ) -> None:
        """``multipart_condition`` gives the condition for the commit of many parts, or raises when there must be none."""
        self._requests = requests
        self._key = key
        self._place = place
        self._part_bytes = part_bytes
        self._parallel = parallel
        self._multipart_condition = multipart_condition
        self._condition: dict[str, str] = {}
        self._buffer = bytearray()
        self._hasher = xxhash.xxh3_128()
        self._bytes = 0
        self._upload_id = ""
        self._pool: ThreadPoolExecutor | None = None
        self._sending: deque[Future[Reply]] = deque()
        self._etags: list[str] = []
        self._broken: StorageError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any) -> int:
        """Take all of ``data``.

        Raises:
            StorageError: a part could not be sent; the upload is lost.
        """
        if self._broken is not None:
            raise self._broken
        with memoryview(data).cast("B") as view:
            self._hasher.update(view)
            self._buffer += view
            count = len(view)
        self._bytes += count
        while len(self._buffer) > self._part_bytes:
            part = bytes(memoryview(self._buffer)[: self._part_bytes])
            del self._buffer[: self._part_bytes]
            self._send(part)
        return count

    def finish(self) -> tuple[FileRef, Callable[[], Reply], bool]:
        """Send what is left. Returns what was written, the request that commits it, and whether that is conditional.

        Raises:
            StorageError: a part could not be sent.
        """
        if self._broken is not None:  # the writer may have swallowed it
            raise self._broken
        ref = FileRef(path="", bytes=self._bytes, digest="xxh128:" + self._hasher.hexdigest())
        if not self._upload_id:
            content = bytes(self._buffer)
            return ref, lambda: self._requests.once("put_object", Key=self._key, Body=content, IfNoneMatch="*"), True
        self._send(bytes(self._buffer))
        while self._sending:
            self._take_oldest()
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(self._etags, 1)]
        arguments = {"Key": self._key, "UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        arguments |= self._condition
        return ref, lambda: self._requests.once("complete_multipart_upload", **arguments), bool(self._condition)

    def abort(self) -> None:
        """Take back what was sent."""
        self.end()
        if self._upload_id:
            with contextlib.suppress(RequestError):
                self._requests.repeated("abort_multipart_upload", Key=self._key, UploadId=self._upload_id)

    def end(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _send(self, part: bytes) -> None:
        try:
            if self._pool is None:
                self._condition = self._multipart_condition()
                self._pool = ThreadPoolExecutor(self._parallel)
                reply = self._requests.repeated("create_multipart_upload", Key=self._key)
                self._upload_id = reply["UploadId"]
            number = len(self._etags) + len(self._sending) + 1
            if number > _MOST_PARTS:
                raise StorageError(
                    f"{self._place} has more than {_MOST_PARTS:,} parts of {self._part_bytes:,} bytes",
                    mend="raise part_bytes of the object store",
                )
            # A part can be repeated: the same number with the same bytes.
            self._sending.append(
                self._pool.submit(
                    self._requests.repeated,
                    "upload_part",
                    Key=self._key,
                    UploadId=self._upload_id,
                    PartNumber=number,
                    Body=part,
                )
            )
            if len(self._sending) > self._parallel:
                self._take_oldest()
        except RequestError as error:
            self._broken = error.as_storage_error(self._place)
            raise self._broken from error
        except StorageError as error:
            self._broken = error
            raise

    def _take_oldest(self) -> None:
        try:
            self._etags.append(self._sending.popleft().result()["ETag"])
        except RequestError as error:
            raise error.as_storage_error(self._place) from error
