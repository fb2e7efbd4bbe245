"""One broadcast of one version, as both sides play it. Owns the order of words and buckets; never reads or writes files.

    trainer (rank 0)                                     worker (rank r)
    1  header: version, tensors, digests          ──>
    2                                             <──    here/r
    3  word: "go", or "off" when one is missing   ──>
    4  both: join the process group, if it is new
    5  buckets, each one collective               ──>    into memory of its own, beside what is in use
    6                                             <──    done/r: "ok" when every digest was that of the published manifest
    -  when it breaks off: both close their connections, so that all others hear of it,
                                                  <──    left/r: who does not say so in a moment is taken for the cause

Words go through the group's store under the number of the round, so that a late one of an earlier round is never taken for
a new one.

Crash states (the version's files were committed before step 1, whatever happens here):

=========================================== ===============================================================================
who                                         what happens
=========================================== ===============================================================================
a worker dies, hangs or is late before 2    step 3 says "off" after a part of the time; its name is kept; no bytes were sent
a worker dies in 4 to 6                     its connections break: rank 0 and with it all others stop at once
a worker hangs or is too slow in 4 to 6     rank 0 stops at the end of the time (or when the controller has killed the worker);
                                            when nobody can be named, all members of the group sit out
the trainer dies at any point               connections break, or the time ends: workers give up what they have
a digest is wrong                           the worker says so in 6, and does not use it
=========================================== ===============================================================================

In each case workers drop what came (it was never in use), take the version from its files, and come to the next group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from milesbatch.broadcast.group import Group
from milesbatch.broadcast.header import Header, fill_bucket, new_stream
from milesbatch.errors import BroadcastError
from milesbatch.faults.points import point
from milesbatch.weights.tensors import Bytes, RawTensor

_OK = b"ok"
_GO, _OFF = b"go", b"off"
_LEFT_WITHIN_S = 1.0
_LATE_S = 0.1
_SOON_S = 5.0


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a broadcast that was sent to its end; ranks are those of workers, from 1."""

    confirmed: tuple[int, ...]
    refused: Mapping[int, str]
    """Rank -> why it will not use what it got."""


class UnansweredError(BroadcastError):
    """Some workers did not say what they had to in time."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        super().__init__(what)
        self.ranks = ranks


def send(group: Group, number: int, header: Header, tensors: Mapping[str, RawTensor], deadline_s: float) -> Sent:
    """Rank 0: send a version to all workers of the group, as round ``number``.

    ``tensors`` must stay as they are until it returns. Extra memory: one bucket.

    Raises:
        UnansweredError: workers were missing at the beginning or at the end; the group must not be used again.
        BroadcastError: it broke off; the same.
    """
    workers = range(1, group.size)
    group.say(f"{number}/header", header.to_bytes())
    if missing := group.await_all([f"{number}/here/{rank}" for rank in workers], _to_meet_by(deadline_s)):
        group.say(f"{number}/word", _OFF)
        raise UnansweredError("workers did not come to a broadcast", _ranks(missing))
    group.say(f"{number}/word", _GO)
    try:
        group.join(deadline_s)
        buffer = np.empty(min(header.bucket_bytes, header.num_bytes), np.uint8)
        for bucket in range(header.num_buckets):
            point("broadcast.sending")
            group.broadcast(fill_bucket(header, tensors, bucket, buffer), deadline_s)
    except BroadcastError as error:
        raise _broken_off(group, number, error, deadline_s) from error
    done = {f"{number}/done/{rank}": rank for rank in workers}
    if missing := group.await_all(list(done), deadline_s):
        raise UnansweredError("workers did not confirm a broadcast", _ranks(missing))
    words = {rank: group.hear(key, deadline_s) for key, rank in done.items()}
    group.forget([f"{number}/header", f"{number}/word", *done, *(f"{number}/here/{rank}" for rank in workers)])
    refused = {rank: word.decode(errors="replace") for rank, word in words.items() if word != _OK}
    return Sent(tuple(rank for rank in words if rank not in refused), refused)


def receive(group: Group, number: int, deadline_s: float) -> tuple[Header, Bytes]:
    """A worker: take part in round ``number``; returns the header and all bytes, of which nothing is proven yet.

    Raises:
        BroadcastError: it was called off, or broke off; the group must not be used again.
    """
    try:
        return _receive(group, number, deadline_s)
    except BroadcastError:
        group.disconnect()
        with suppress(BroadcastError):
            group.say(f"{number}/left/{group.rank}")
        raise


def _receive(group: Group, number: int, deadline_s: float) -> tuple[Header, Bytes]:
    group.say(f"{number}/here/{group.rank}")
    if group.hear(f"{number}/word", deadline_s) != _GO:
        raise BroadcastError("the trainer called the broadcast off: not all workers came")
    header = Header.from_bytes(group.hear(f"{number}/header", deadline_s))
    stream = new_stream(header)
    group.join(deadline_s)
    for bucket in range(header.num_buckets):
        begin, end = header.bounds(bucket)
        group.broadcast(stream[begin:end], deadline_s)
        point("broadcast.receiving")
    return header, stream


def confirm(group: Group, number: int, refusal: str = "") -> None:
    """A worker: say that the version is proven and kept, or why it is not.

    Raises:
        BroadcastError: the trainer is gone.
    """
    group.say(f"{number}/done/{group.rank}", refusal.encode() or _OK)


def _to_meet_by(deadline_s: float) -> float:
    """All must be there after a quarter of the time; in up to five seconds, if that is no more than half of it."""
    now_s = time.monotonic()
    left_s = deadline_s - now_s
    return now_s + max(left_s / 4, min(left_s / 2, _SOON_S))


def _broken_off(group: Group, number: int, error: BroadcastError, deadline_s: float) -> UnansweredError:
    """Who caused it: the workers that do not say that they have left, or, when the time was over, perhaps any of them."""
    was_late = time.monotonic() > deadline_s - _LATE_S
    group.disconnect()
    workers = range(1, group.size)
    silent = group.await_all([f"{number}/left/{rank}" for rank in workers], time.monotonic() + _LEFT_WITHIN_S)
    ranks = _ranks(silent) if silent or not was_late else tuple(workers)
    return UnansweredError(error.what, ranks)


def _ranks(keys: list[str]) -> tuple[int, ...]:
    return tuple(int(key.rpartition("/")[2]) for key in keys)
