"""Whether an object store honours conditional puts, proven by trying: servers that do not know them ignore them silently.

Owns what was found out about one store. Never writes but objects with a temporary name, which it takes away again.
Invariant: nothing is committed to a store that has not shown that it refuses a second creation. What a trial cannot show is
that the refusal is atomic under concurrency; that is assumed, and said in ``docs/storage.md``.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable

from milesbatch.errors import StorageError
from milesbatch.store.durable import TEMPORARY_PREFIX
from milesbatch.store.object_requests import RequestError, Requests
from milesbatch.store.port import join

EXCLUSIVE = {"IfNoneMatch": "*"}


class ConditionalPuts:
    """What the store behind ``requests`` can do, found out once and when it is first needed (readers never ask)."""

    def __init__(self, requests: Requests, root: str, url: str) -> None:
        self._requests = requests
        self._root = root
        self._url = url
        self._lock = threading.Lock()
        self._put: bool | None = None
        self._multipart: bool | None = None

    def require(self) -> None:
        """Return only when a second creation of an object is refused.

        Raises:
            StorageError: it is not, or the store does not answer.
        """
        with self._lock:
            if self._put is None:
                self._put = self._try(self._second_put)
        if not self._put:
            raise StorageError(
                f"{self._url}: the server takes a second creation of the same object (it ignores or does not know"
                " If-None-Match: * with PutObject), so two writers could both believe that they won",
                mend="use a server that honours conditional puts (AWS S3, MinIO, ...), or a directory",
            )

    def for_multipart(self, *, name_carries_digest: bool, place: str) -> dict[str, str]:
        """The condition for the commit of a multipart upload; none where the server does not honour it and needs not.

        Raises:
            StorageError: the server does not honour it, and the name says nothing about the content.
        """
        with self._lock:
            if self._multipart is None:
                self._multipart = self._try(self._second_multipart)
        if self._multipart:
            return EXCLUSIVE
        if name_carries_digest:
            return {}  # whoever writes under this name writes the same content
        raise StorageError(
            f"{place}: the server ignores If-None-Match: * when a multipart upload is completed, so another writer's"
            " content could be replaced",
            mend="let the name carry the digest of the content, or raise part_bytes so that it is one part",
        )

    def _try(self, second: Callable[[str], None]) -> bool:
        failure: RequestError | None = None
        for _ in self._requests.retries.each_attempt():
            # A new name each time: after an unknown end the old one may or may not exist.
            key = join(self._root, f"{TEMPORARY_PREFIX}condition-{secrets.token_hex(8)}")
            try:
                self._requests.once("put_object", Key=key, Body=b"first", **EXCLUSIVE)
                second(key)
                return False
            except RequestError as error:
                if error.is_condition:
                    return True
                if error.status == 501:
                    return False
                if not error.may_repeat:
                    raise error.as_storage_error(self._url) from error
                failure = error
            finally:
                with contextlib.suppress(RequestError):
                    self._requests.repeated("delete_object", Key=key)
        assert failure is not None
        raise failure.as_storage_error(self._url) from failure

    def _second_put(self, key: str) -> None:
        self._requests.once("put_object", Key=key, Body=b"second", **EXCLUSIVE)

    def _second_multipart(self, key: str) -> None:
        upload = self._requests.once("create_multipart_upload", Key=key)["UploadId"]
        try:
            etag = self._requests.once("upload_part", Key=key, UploadId=upload, PartNumber=1, Body=b"second")["ETag"]
            parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
            self._requests.once(
                "complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload=parts, **EXCLUSIVE
            )
        finally:
            with contextlib.suppress(RequestError):
                self._requests.repeated("abort_multipart_upload", Key=key, UploadId=upload)
