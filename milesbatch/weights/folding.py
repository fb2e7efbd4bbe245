"""Applying payload to all tensors of a version: consecutive deltas in one pass over each tensor, several tensors at a time.

Owns the pass and its threads; never reads a file and never chooses a way. Invariant: arrays that it was not given for good are
never written to; what it returns has, for every tensor, the digest that the last link's manifest states. A link's payload
has been compared with its file's digest before it comes here, so a base is never touched by damaged payload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from milesbatch.errors import CorruptArtefactError
from milesbatch.records import TensorEntry, WeightsManifest
from milesbatch.weights.codec import PayloadError, apply, open_change
from milesbatch.weights.payload import Change
from milesbatch.weights.tensors import RawTensor, element_bytes, num_bytes

Item = TypeVar("Item")
Result = TypeVar("Result")

_MEND = "run `milesbatch weights verify` on the run"
_MOST_THREADS = 8
_WORTH_THREADS = 1 << 22
"""Bytes of tensors below which threads cost more than they bring."""


@dataclass(frozen=True, slots=True)
class Link:
    """One delta of a chain: its manifest, its directory (for messages), and its verified payload by file and tensor."""

    manifest: WeightsManifest
    directory: Path
    payloads: Mapping[str, Mapping[str, RawTensor]]


class DigestError(CorruptArtefactError):
    """Tensors have another digest than a manifest states, though every file that they came from is as committed."""


class LinkError(CorruptArtefactError):
    """The payload of one link is none for the tensors that it meets, though its files are as committed."""

    def __init__(self, link: Link, what: str) -> None:
        super().__init__(what, mend=_MEND)
        self.version = link.manifest.version


def fold(links: Sequence[Link], before: Mapping[str, RawTensor], *, owned: bool) -> dict[str, RawTensor]:
    """All tensors after the last of ``links``. With ``owned``, ``before`` is given for good and changed in place.

    Unchanged tensors share memory with ``before``. Units: memory beyond the result is 64 MiB a thread.

    Raises:
        LinkError: a payload does not fit what it meets; names version and tensor.
        DigestError: a tensor has another digest than the last manifest states: ``before`` was something else.
    """
    entries = [{entry.name: entry for entry in link.manifest.tensors} for link in links]
    work = [[of_link.get(name) for of_link in entries] for name in entries[-1]]

    def one(column: list[TensorEntry | None]) -> RawTensor:
        return _fold_tensor(links, column, before, owned=owned)

    sizes = sum(tensor.data.size for tensor in before.values())
    return dict(zip(entries[-1], in_threads(one, work, num_bytes=sizes), strict=True))


def fold_tensor(links: Sequence[Link], name: str, before: Mapping[str, RawTensor]) -> RawTensor:
    """One tensor after the last of ``links``, in memory of its own unless nothing changes it.

    Raises:
        LinkError, DigestError: as :func:`fold`.
    """
    column = [next((entry for entry in link.manifest.tensors if entry.name == name), None) for link in links]
    return _fold_tensor(links, column, before, owned=False)


def in_threads(do: Callable[[Item], Result], items: Iterable[Item], *, num_bytes: int) -> list[Result]:
    """Results in order. In several threads when ``num_bytes`` of tensors are worth it: the loops inside need no lock."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if threads == 1 or num_bytes < _WORTH_THREADS:
        return [do(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        return list(pool.map(do, items))


def _fold_tensor(
    links: Sequence[Link], column: Sequence[TensorEntry | None], before: Mapping[str, RawTensor], *, owned: bool
) -> RawTensor:
    last = column[-1]
    assert last is not None
    old = before.get(last.name)
    changes: list[Change] = []
    of_links: list[Link] = []
    for link, entry in zip(links, column, strict=True):
        change = _open(link, last.name, entry, old)
        if change is not None:
            changes.append(change)
            of_links.append(link)
    assert old is not None, "each link needs the tensor"
    new = old if owned or not changes else RawTensor(old.dtype, old.shape, np.empty(old.data.size, np.uint8))
    try:
        digest = apply(changes, old.data, new.data, element_bytes(old.dtype))
    except PayloadError as error:
        link = of_links[error.place]
        raise LinkError(link, f"{link.directory}: tensor {last.name}: {error.what}") from error
    if digest != last.digest:
        path = links[-1].directory / "manifest.json"
        raise DigestError(
            f"{path}: tensor {last.name} should be {last.dtype} {last.shape} {last.digest}, found {digest}", mend=_MEND
        )
    return new


def _open(link: Link, name: str, entry: TensorEntry | None, old: RawTensor | None) -> Change | None:
    """What ``link`` does to a tensor; None when nothing."""
    if entry is None or old is None or (old.dtype, old.shape) != (entry.dtype, entry.shape):
        found = "no such tensor" if old is None else f"{old.dtype} {old.shape}"
        wanted = "not there" if entry is None else f"{entry.dtype} {entry.shape}"
        raise LinkError(link, f"{link.directory}: tensor {name} is {wanted}, its parent version has {found}")
    if entry.encoding == "same":
        return None
    payload = link.payloads.get(entry.file or "", {}).get(name)
    if payload is None:
        raise LinkError(link, f"{link.directory / (entry.file or '')} lacks tensor {name}")
    size, width = num_bytes(entry.dtype, entry.shape), element_bytes(entry.dtype)
    try:
        return open_change(entry.encoding, payload.data, num_bytes=size, element_bytes=width)
    except CorruptArtefactError as error:
        raise LinkError(link, f"{link.directory}: tensor {name}: {error.what}") from error
