"""Versions to send, and members of a group in threads and processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from milesbatch.broadcast.attempt import Attempt
from milesbatch.broadcast.group import Group
from milesbatch.broadcast.header import header_of, tensors_in
from milesbatch.broadcast.rounds import Sent, confirm, receive, send
from milesbatch.records import FileRef, TensorEntry, WeightsManifest, digest_bytes
from milesbatch.weights.digest import entries_digest
from milesbatch.weights.tensors import RawTensor

BUCKET = 64 << 10
HERE = "127.0.0.1"


def manifest_of(tensors: Mapping[str, RawTensor], version: int = 3) -> WeightsManifest:
    """What is published of these tensors, without the files."""
    keyframe = FileRef(path="keyframe.x", bytes=1, digest=digest_bytes(b"x"))
    entries = tuple(
        TensorEntry(
            name=name, dtype=t.dtype, shape=t.shape, digest=t.digest, encoding="raw", changed=0, file=keyframe.path
        )
        for name, t in sorted(tensors.items())
    )
    return WeightsManifest(
        version=version,
        incarnation=1,
        artefact="keyframe",
        parent=None,
        keyframe=keyframe.path,
        weights_digest=entries_digest(entries),
        tensors=entries,
        tied={},
        files=(keyframe,),
        created_at="2026-03-01T12:00:00.000000Z",
    )


def make_version(version: int, seed: int = 0) -> tuple[WeightsManifest, dict[str, RawTensor]]:
    """About 2.6 MB: 41 buckets, one large tensor over many of them, small ones together in one."""
    chance = np.random.default_rng([version, seed])
    shapes = {
        "embed": ("F32", (500, 1000)),
        "norm": ("BF16", (77,)),
        "head": ("BF16", (300, 1000)),
        "none": ("F32", (0,)),
    }
    sizes = {name: int(np.prod(shape)) * (4 if dtype == "F32" else 2) for name, (dtype, shape) in shapes.items()}
    tensors = {
        name: RawTensor(dtype, shape, chance.integers(0, 256, sizes[name], np.uint8))
        for name, (dtype, shape) in shapes.items()
    }
    return manifest_of(tensors, version), tensors


class Worker:
    """A member in a thread: takes part in rounds, one after the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.group: Group | None = None
        self.refusal = ""

    def take_part(self, address: str, size: int, number: int, timeout_s: float) -> Attempt[dict[str, RawTensor]]:
        def work() -> dict[str, RawTensor]:
            deadline_s = time.monotonic() + timeout_s
            if self.group is None:
                self.group = Group.enter(address, self.rank, size, deadline_s)
            header, stream = receive(self.group, number, deadline_s)
            confirm(self.group, number, self.refusal)
            return tensors_in(header, stream)

        return Attempt(f"worker-{self.rank}", work)


def send_in_thread(group: Group, number: int, version: int, timeout_s: float, seed: int = 0) -> Attempt[Sent]:
    manifest, tensors = make_version(version, seed)
    header = header_of(manifest, BUCKET)
    return Attempt("sender", lambda: send(group, number, header, tensors, time.monotonic() + timeout_s))


class Child:
    """A member as a process, with an accident; see ``member.py``."""

    def __init__(self, rank: int, address: str, size: int, timeout_s: float, at: str, nth: int, action: str) -> None:
        words = [str(word) for word in (rank, address or "-", size, timeout_s, at, nth, action)]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("member.py")), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> str:
        """Waits until it could begin; returns the port that it listens on, if it does."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["ready"]
        return words[1] if len(words) > 1 else ""

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def await_accident(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "now\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
