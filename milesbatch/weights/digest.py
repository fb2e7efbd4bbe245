"""The weights digest: one value that proves every tensor of a policy version.

Owns what is hashed and in which order; never reads files and needs no torch. Invariant: the digest depends on the
stored tensors alone (name, dtype, shape, raw bytes), not on how or in which order they were stored or sent. The page
behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

from milesbatch.records import TensorEntry, canonical_json, digest_bytes

TensorIdentity = tuple[str, str, tuple[int, ...], str]
"""Name, dtype (safetensors spelling), shape, digest of the raw little-endian bytes."""


def weights_digest(identities: Iterable[TensorIdentity]) -> str:
    """Digest over all stored tensors in name order (tied aliases are not stored, so not counted).

    Raises:
        ValueError: a name comes twice.
    """
    rows = sorted(identities)
    names = [name for name, _, _, _ in rows]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"these tensors come twice: {', '.join(twice)}")
    return digest_bytes(canonical_json([[name, dtype, list(shape), digest] for name, dtype, shape, digest in rows]))


def entries_digest(entries: Iterable[TensorEntry]) -> str:
    """Weights digest that a manifest's tensor entries amount to."""
    return weights_digest((entry.name, entry.dtype, entry.shape, entry.digest) for entry in entries)
