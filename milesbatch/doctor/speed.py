"""What a filesystem costs: durable commits, bandwidth; and its clock. Measured from one host.

Invariant: writes only in the directory that it is given.
"""

from __future__ import annotations

import secrets
import statistics
import time
from pathlib import Path

from milesbatch.doctor.verdict import Check, bad, ok, warn
from milesbatch.doctor.workplace import Effort
from milesbatch.store.durable import publish_file
from milesbatch.store.operations import current

_AREA = "filesystem"
_CHUNK = 1 << 20
_SLOW_SYNC_S = 0.05
_SLOW_BYTES_PER_S = 100e6
_SKEW_S = 1.0


def sync_check(place: Path, effort: Effort) -> Check:
    """What it costs to make a small file, and its name, durable: each commit pays it."""
    costs = []
    for turn in range(effort.syncs):
        began_s = time.perf_counter()
        publish_file(place / f"synced-{turn}", b"x" * 4096)
        costs.append(time.perf_counter() - began_s)
    usual, worst = statistics.median(costs), max(costs)
    found = f"a commit of 4 KiB takes {usual * 1e3:.1f} ms, at worst {worst * 1e3:.0f} ms"
    if usual > _SLOW_SYNC_S:
        meaning = f"a step has about ten commits: at least {10 * usual:.1f} s of each step"
        return warn(_AREA, "fsync", found, meaning, "fine for long steps; for short ones choose a faster filesystem")
    return ok(_AREA, "fsync", found)


def clock_check(place: Path, effort: Effort) -> Check:
    """This host's clock beside the one that stamps files. Nothing is decided by clocks; logs are read by them."""
    before_s = time.time()
    (place / "clock").write_bytes(b"x")
    after_s = time.time()
    stamp_s = (place / "clock").stat().st_mtime
    skew_s = max(before_s - stamp_s, stamp_s - after_s, 0.0)
    if skew_s > _SKEW_S:
        meaning = "logs of several hosts are merged in the wrong order; runs themselves do not use clocks"
        return warn(
            _AREA, "the file server's clock", f"differs by {skew_s:.1f} s", meaning, "synchronize clocks (chrony, ntpd)"
        )
    return ok(_AREA, "the file server's clock", f"within {max(skew_s, 0.01):.2f} s of this host's")


def throughput_check(place: Path, effort: Effort) -> Check:
    """One large file, written durably and read back (which a cache may serve)."""
    block = secrets.token_bytes(_CHUNK)
    path = place / "large"
    began_s = time.perf_counter()
    with current().create(path) as stream:
        for _ in range(effort.payload_bytes // _CHUNK):
            stream.write(block)
        current().sync_file(path, stream)
    written_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            if chunk != block:
                return bad(
                    _AREA,
                    "throughput",
                    "other bytes were read than written",
                    "nothing can be trusted here",
                    "do not use it",
                )
    read_s = time.perf_counter() - began_s
    size = effort.payload_bytes
    found = (
        f"writes {size / written_s / 1e6:.0f} MB/s durably, reads {size / read_s / 1e6:.0f} MB/s (perhaps from a cache)"
    )
    if size / written_s < _SLOW_BYTES_PER_S:
        meaning = f"weights of 1 GB take {1e9 / (size / written_s):.0f} s to publish"
        return warn(
            _AREA, "throughput", found, meaning, "weights.dtype: bfloat16 and larger steps help; or a faster filesystem"
        )
    return ok(_AREA, "throughput", found)
