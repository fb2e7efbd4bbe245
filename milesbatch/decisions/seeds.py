"""All randomness is a pure function of (run seed, purpose, group, sample): a killed run draws what it would have drawn."""

from __future__ import annotations

import struct

import xxhash


def derive_seed(run_seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for ``purpose`` (for example ``"sample"``) at ``indices`` (for example group id, sample index)."""
    packed = struct.pack(f"<{1 + len(indices)}q", run_seed, *indices)
    return xxhash.xxh3_64_intdigest(purpose.encode() + b"\0" + packed) >> 1
