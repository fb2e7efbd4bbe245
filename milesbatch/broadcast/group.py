"""One process's part in one generation of the broadcast group: a store for words, a process group for bytes.

    generation 4:  TCPStore at the trainer's rank 0  <── workers connect, say that they are there, wait for the word
                   process group (gloo on the CPU, NCCL on GPUs), rank 0 = trainer, made when all are there

Owns the only torch.distributed objects of a broadcast; the trainer's default group is not touched and need not exist.
Invariant: every call returns or raises by its deadline as far as the library keeps its promise; callers run it in an
:class:`~milesbatch.broadcast.attempt.Attempt` for the case that it does not. A group in which anything failed is never used
again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from milesbatch.errors import BroadcastError
from milesbatch.weights.tensors import Bytes

_LOOK_S = 0.02
_OPEN_S = 4.0
"""A store on this host answers at once; longer means that the host is not at the address by which others know it."""
_ROOT = 0


class Group:
    """Store and process group of one generation. Not for several threads at a time."""

    def __init__(self, store: Any, rank: int, size: int, device: str) -> None:
        self._store = store
        self.rank, self.size = rank, size
        self._device = torch.device(device)
        self._group: Any = None
        self._buffer: torch.Tensor | None = None
        """On a GPU: the bucket there."""

    # -- meeting ----------------------------------------------------------------------------------------------------

    @classmethod
    def found(cls, address: str, size: int, timeout_s: float, device: str = "cpu") -> Group:
        """Rank 0 of a new generation of ``size`` processes; its store listens on a free port of this host.

        ``timeout_s`` is for all that waits without a time of its own.

        Raises:
            BroadcastError: it cannot listen, or cannot be reached at ``address`` within a few seconds.
        """
        with _errors(f"a store for a broadcast cannot be opened at {address}"):
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, 0, is_master=True, timeout=timedelta(seconds=_OPEN_S), wait_for_workers=False
            )
            store.set_timeout(timedelta(seconds=timeout_s))
        return cls(store, _ROOT, size, device)

    @classmethod
    def enter(cls, address: str, rank: int, size: int, deadline_s: float, device: str = "cpu") -> Group:
        """Another rank of the generation whose store listens at ``address`` (``host:port``).

        Raises:
            BroadcastError: it does not answer in time.
        """
        host, _, port = address.rpartition(":")
        with _errors(f"the store of a broadcast at {address} cannot be reached"):
            timeout = timedelta(seconds=_left(deadline_s))
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, timeout=timeout, wait_for_workers=False
            )
        return cls(store, rank, size, device)

    @property
    def port(self) -> int:
        return int(self._store.port)

    def join(self, deadline_s: float) -> None:
        """Connect to all others, once; all of them must do the same.

        Raises:
            BroadcastError: some did not come in time.
        """
        if self._group is not None:
            return
        timeout = timedelta(seconds=_left(deadline_s))
        with _errors("the members of a broadcast could not connect to each other"):
            store = dist.PrefixStore("group", self._store)  # type: ignore[attr-defined]
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined, unused-ignore]
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(  # type: ignore[attr-defined, unused-ignore]
                    store, self.rank, self.size, options
                )
            else:  # listens where GLOO_SOCKET_IFNAME says, else where the host's name leads: as the trainer's own group
                self._group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def disconnect(self) -> None:
        """Close the connections, so that all others hear of it at once; words can still be said.

        May wait for an operation that still runs: not for a thread that has other things to do.
        """
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()
        self._buffer = None

    def leave(self) -> None:
        """Let go of everything; as :meth:`disconnect`."""
        self.disconnect()
        self._store = None

    # -- bytes ------------------------------------------------------------------------------------------------------

    def broadcast(self, data: Bytes, deadline_s: float) -> None:
        """Rank 0's ``data`` (flat uint8, the same size everywhere) into everybody's ``data``.

        Raises:
            BroadcastError: it did not come about by the deadline; ``data`` of a receiver may hold anything.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _ROOT, 0
        timeout = timedelta(seconds=_left(deadline_s))
        options.timeout = timeout
        if self._group is None:
            raise BroadcastError("this process is not connected")
        host = torch.from_numpy(data)
        with _errors("a bucket was not sent to all, or did not come"):
            if self._device.type != "cuda":
                self._group.broadcast([host], options).wait(timeout)
                return
            bucket = self._on_device(host)
            self._group.broadcast([bucket], options).wait(timeout)
            if self.rank != _ROOT:
                host.copy_(bucket)  # waits for the stream

    def _on_device(self, host: torch.Tensor) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < host.numel():
            self._buffer = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        bucket = self._buffer[: host.numel()]
        if self.rank == _ROOT:
            bucket.copy_(host)
        return bucket

    # -- words ------------------------------------------------------------------------------------------------------

    def say(self, key: str, word: bytes = b"") -> None:
        """Put a word where all can find it.

        Raises:
            BroadcastError: the store is gone.
        """
        with _errors("the store of a broadcast is gone"):
            self._words().set(key, word)

    def hear(self, key: str, deadline_s: float) -> bytes:
        """The word at ``key``; waits for it.

        Raises:
            BroadcastError: it was not said by the deadline, or the store is gone.
        """
        with _errors(f"nothing was heard of {key.rpartition('/')[2]}"):
            self._words().wait([key], timedelta(seconds=_left(deadline_s)))
            return bytes(self._words().get(key))

    def await_all(self, keys: Sequence[str], deadline_s: float) -> list[str]:
        """Waits until there is a word at each key; returns those at which there was none by the deadline.

        Raises:
            BroadcastError: the store is gone.
        """
        missing = list(keys)
        with _errors("the store of a broadcast is gone"):
            while True:
                missing = [key for key in missing if not self._words().check([key])]
                if not missing or time.monotonic() > deadline_s:
                    return missing
                time.sleep(_LOOK_S)

    def forget(self, keys: Sequence[str]) -> None:
        """Rank 0: these words are not needed any more."""
        with _errors("the store of a broadcast is gone"):
            for key in keys:
                self._words().delete_key(key)

    def _words(self) -> Any:
        store = self._store
        if store is None:
            raise BroadcastError("this process has left the group")
        return store


def _left(deadline_s: float) -> float:
    """Seconds until the deadline; not less than what the library takes for a time at all.

    Raises:
        BroadcastError: it has passed.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise BroadcastError("the time for the broadcast was over")
    return max(left_s, 0.01)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch.distributed's own errors are RuntimeErrors
        raise BroadcastError(f"{what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
