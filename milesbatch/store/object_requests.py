"""Requests to an S3-like object store, each with one of three ends: answered, refused or never sent, or unknown.

Owns the connection (through fsspec and s3fs), the split of errors and the bounded repetition of requests. Never decides
what an unknown end means: that takes a look at the store (``store/object_store.py``). Invariant: one call of
:meth:`Requests.once` puts at most one request of ours on the wire: the retries of s3fs and botocore are off, since they would
repeat a commit without asking the fence. (aiohttp may still repeat a PUT on a connection that the server had closed:
harmless where the PUT is conditional and "exists" leads to a comparison.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from milesbatch.errors import InputError, StorageError, StorageFullError, StorageReadOnlyError

Reply = dict[str, Any]
_FULL = {"QuotaExceeded", "StorageFull", "XMinioStorageFull", "InsufficientCapacity"}
_REPEATABLE_REFUSALS = {"SlowDown", "RequestTimeout", "ThrottlingException", "Throttling", "ConditionalRequestConflict"}


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is made in all, and the pauses between: doubled each time, with jitter, bounded."""

    attempts: int = 5
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0

    def each_attempt(self) -> Iterator[int]:
        """Number of each attempt, 0 first; pauses before all but the first."""
        for attempt in range(self.attempts):
            if attempt:
                pause_s = min(self.longest_pause_s, self.first_pause_s * 2 ** (attempt - 1))
                time.sleep(pause_s * random.uniform(0.5, 1.0))  # many clients must not come back at the same moment
            yield attempt


class RequestError(Exception):
    """A request without a good answer. ``is_unknown``: it may have been carried out, or may still be."""

    def __init__(
        self, operation: str, cause: str, *, status: int = 0, code: str = "", is_unknown: bool = False
    ) -> None:
        super().__init__(f"{operation}: {cause}")
        self.operation = operation
        self.status = status
        self.code = code
        self.is_unknown = is_unknown
        self.may_repeat = is_unknown or status in (0, 409, 429) or code in _REPEATABLE_REFUSALS

    @property
    def is_missing(self) -> bool:
        return self.code in ("NoSuchKey", "NotFound", "404")

    @property
    def is_condition(self) -> bool:
        """The condition of a conditional request did not hold."""
        return self.status == 412

    def as_storage_error(self, place: str) -> StorageError:
        """What the user is told."""
        if self.code in _FULL or self.status == 507:
            return StorageFullError(
                f"no space or quota left for {place} ({self})", mend="free space, or raise the quota"
            )
        if self.status in (401, 403):
            reads = self.operation.startswith(("get", "list", "head"))
            mend = "check the credentials and their rights (without s3:ListBucket what is missing looks forbidden)"
            return (StorageError if reads else StorageReadOnlyError)(f"not allowed to use {place} ({self})", mend=mend)
        if self.code == "NoSuchBucket":
            return StorageError(
                f"cannot use {place}: there is no such bucket", mend="create the bucket, or correct the URL"
            )
        return StorageError(
            f"cannot use {place} ({self})", mend="check the object store, then give the same command again"
        )


class Requests:
    """Requests to one bucket. Thread-safe; not to be used after a fork (open another in the child)."""

    def __init__(self, filesystem: Any, bucket: str, retries: Retries) -> None:
        self._filesystem = filesystem
        self.bucket = bucket
        self.retries = retries

    def once(self, operation: str, **arguments: Any) -> Reply:
        """The answer to one request; a body is read in full.

        Raises:
            RequestError: refused, never sent, or unknown.
        """
        from fsspec.asyn import sync

        reply: Reply = sync(self._filesystem.loop, self._ask, operation, arguments)
        return reply

    def repeated(self, operation: str, **arguments: Any) -> Reply:
        """As :meth:`once`, for requests that are safe to repeat: repeated after each end that is not final.

        Raises:
            RequestError: refused, or no answer after all attempts.
        """
        last: RequestError | None = None
        for _ in self.retries.each_attempt():
            try:
                return self.once(operation, **arguments)
            except RequestError as error:
                if not error.may_repeat:
                    raise
                last = error
        assert last is not None
        raise last

    async def _ask(self, operation: str, arguments: Mapping[str, Any]) -> Reply:
        # Imported here: only those who use an object store need the packages.
        from aiohttp import ClientError as AiohttpError
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            await self._filesystem.set_session()
            client = await self._filesystem.get_s3(self.bucket)
            reply: Reply = await getattr(client, operation)(Bucket=self.bucket, **arguments)
            if "Body" in reply:
                async with reply["Body"] as stream:
                    reply["Body"] = await stream.read()
            return reply
        except ClientError as error:
            stated = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, message = str(stated.get("Code", status)), stated.get("Message", "")
            # A server error says nothing about how far the request came, nor does an answer that a proxy made up.
            is_unknown = status == 0 or status >= 500
            raise RequestError(
                operation, f"{status} {code} {message}".strip(), status=status, code=code, is_unknown=is_unknown
            ) from error
        except BotoCoreError as error:
            raise _without_answer(operation, error) from error
        except (TimeoutError, ResponseParserError, AiohttpError, OSError) as error:
            raise RequestError(operation, f"{type(error).__name__} {error}", is_unknown=True) from error


def _without_answer(operation: str, error: Any) -> RequestError:
    """Whether a request that got no answer can have reached the server."""
    from aiohttp import ClientConnectorError
    from botocore import exceptions

    cause = f"{type(error).__name__}: {error}"
    if not isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        # No credentials, a parameter that cannot be sent: never left this process, and the same again will not either.
        refused = RequestError(operation, cause)
        refused.may_repeat = False
        return refused
    # aiobotocore says "could not connect" also for a connection that was reset after the request: ask what it was made of.
    made_of = error.kwargs.get("error")
    never_sent = isinstance(
        error, exceptions.ConnectTimeoutError | exceptions.ProxyConnectionError | exceptions.SSLError
    )
    never_sent = never_sent or isinstance(made_of, ClientConnectorError)
    return RequestError(operation, cause, is_unknown=not never_sent)


def open_filesystem(protocol: str, place: str, client: Mapping[str, Any], timeouts: Mapping[str, float]) -> Any:
    """The fsspec filesystem behind ``place``, made so that every request is ours to repeat or not.

    Raises:
        InputError: no exclusive creation is possible there, or a package is missing; says what.
    """
    import fsspec

    if protocol not in ("s3", "s3a"):
        raise InputError(
            f"{place}: no store for runs can be opened on {protocol}://: its fsspec filesystem has no exclusive"
            " creation that is atomic on the server (S3: a conditional put, If-None-Match: *)",
            mend="use s3:// (any server that honours conditional puts), or a directory",
        )
    config = {**dict(client.get("config_kwargs", {})), **timeouts, "retries": {"total_max_attempts": 1}}
    config.setdefault("max_pool_connections", 32)
    try:
        # fsspec gives equal arguments the same object: several stores share its connections.
        return fsspec.filesystem(protocol, **{**client, "config_kwargs": config}, use_listings_cache=False)
    except ImportError as error:
        raise InputError(
            f"{place}: {error}", mend="install the packages for object stores: pip install 'milesbatch[object-store]'"
        ) from error


def in_order(work: Iterator[Callable[[], Any]], parallel: int) -> Iterator[Any]:
    """Results of ``work`` in its order, at most ``parallel`` of them computed ahead in threads."""
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(parallel) as pool:
        for item in work:
            waiting.append(pool.submit(item))
            if len(waiting) > parallel:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
