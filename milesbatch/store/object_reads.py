"""Reading an S3-like object store: ranges, whole objects in pieces, listings.

Owns the way from a key to the name of an object and back. Never writes. Invariant: what :meth:`Objects.pieces` gives is one
and the same object from its first byte to its last (later ranges are bound to the first one's entity tag), or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from milesbatch.errors import StorageError
from milesbatch.store.object_requests import Reply, RequestError, Requests, in_order
from milesbatch.store.port import MissingArtefactError, check_key, join


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects below ``root`` (a key prefix, or "") of one bucket."""

    requests: Requests
    root: str
    url: str
    part_bytes: int
    parallel: int

    def full(self, key: str) -> str:
        """Name of the object behind a key."""
        return join(self.root, key) if key else self.root

    def place(self, key: str) -> str:
        """The same for messages."""
        return f"{self.url}/{key}"

    def get(self, key: str, first: int, last: int, requests: Requests, **condition: str) -> Reply | None:
        """Bytes ``first`` to ``last`` of an object; None when it ends before."""
        try:
            return requests.repeated("get_object", Key=self.full(key), Range=f"bytes={first}-{last}", **condition)
        except RequestError as error:
            if error.is_missing:
                raise MissingArtefactError(
                    f"{self.place(key)} is not there", mend="run `milesbatch audit` on the run"
                ) from None
            if error.status == 416:
                return None
            raise error.as_storage_error(self.place(key)) from error

    def size(self, key: str) -> tuple[int, str]:
        """Size and entity tag. Asked by a read: unlike HEAD its answer tells a missing object from a missing bucket."""
        reply = self.get(check_key(key), 0, 0, self.requests)
        return (0, "") if reply is None else (total_bytes(reply), reply["ETag"])

    def pieces(self, key: str, requests: Requests | None = None) -> Iterator[bytes]:
        """The content in order; all pieces are of one and the same object, even if it is replaced meanwhile."""
        requests = requests or self.requests
        step = self.part_bytes
        reply = self.get(check_key(key), 0, step - 1, requests)
        if reply is None:
            return  # it is empty
        yield self._whole(key, reply, min(step, total_bytes(reply)))
        rest = range(step, total_bytes(reply))
        yield from in_order(self._ranges(key, rest, reply["ETag"], requests), self.parallel)

    def part(self, key: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` (exclusive), fewer where the object ends; in one request when they are few."""
        if start < stop <= start + self.part_bytes:
            reply = self.get(check_key(key), start, stop - 1, self.requests)
            return b"" if reply is None else self._whole(key, reply, min(stop, total_bytes(reply)) - start)
        size, etag = self.size(key)
        wanted = range(start, min(stop, size))
        return b"".join(in_order(self._ranges(key, wanted, etag, self.requests), self.parallel))

    def _ranges(self, key: str, wanted: range, etag: str, requests: Requests) -> Iterator[Callable[[], bytes]]:
        step = self.part_bytes
        for start in range(wanted.start, wanted.stop, step):
            stop = min(start + step, wanted.stop)

            def get(start: int = start, stop: int = stop) -> bytes:
                reply = self.get(key, start, stop - 1, requests, IfMatch=etag)
                return self._whole(key, reply, stop - start)

            yield get

    def _whole(self, key: str, reply: Reply | None, expected: int) -> bytes:
        body: bytes = b"" if reply is None else reply["Body"]
        if len(body) != expected:
            raise StorageError(
                f"{self.place(key)}: the store sent {len(body)} bytes instead of {expected}", mend="try again"
            )
        return body

    def below(self, prefix: str) -> Iterator[str]:
        """Keys below a directory, in whatever spelling others gave them."""
        full = self.full(prefix)
        for reply in self.pages(
            "list_objects_v2", f"{full}/" if full else "", {"ContinuationToken": "NextContinuationToken"}
        ):
            for entry in reply.get("Contents", ()):
                yield entry["Key"].removeprefix(f"{self.root}/") if self.root else entry["Key"]

    def pages(self, operation: str, full_prefix: str, markers: Mapping[str, str]) -> Iterator[Reply]:
        """All answers of a listing; ``markers``: argument of the next request -> field of the answer before."""
        position: dict[str, str] = {}
        while True:
            try:
                reply = self.requests.repeated(operation, Prefix=full_prefix, **position)
            except RequestError as error:
                raise error.as_storage_error(self.url) from error
            yield reply
            if not reply.get("IsTruncated"):
                return
            position = {argument: reply[field] for argument, field in markers.items()}


def total_bytes(reply: Reply) -> int:
    """Size of the whole object, from the answer to a range."""
    return int(reply["ContentRange"].rpartition("/")[2])
