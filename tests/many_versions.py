"""Manifests of many versions, without any payload and without their digests: as many as a long run has, in a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from milesbatch.records import canonical_json, digest_bytes
from milesbatch.store.layout import RunLayout

ELEMENTS = 10_000
DIGEST = digest_bytes(b"")


def write_versions(
    layout: RunLayout,
    count: int,
    *,
    layers: int,
    kinds: Sequence[str],
    changed: Callable[[int, int], int],
    first: int = 0,
    names: Sequence[str] | None = None,
) -> None:
    """Versions ``first`` to ``count - 1``; ``changed`` gives the changed elements by version and place of the tensor."""
    if names is None:
        names = [f"model.layers.{layer}.{kind}.weight" for layer in range(layers) for kind in kinds]
    for version in range(first, count):
        is_full = version == 0
        file, encoding = ("keyframe.x", "raw") if is_full else ("delta.x", "steps-zstd")
        tensors = [
            {
                "name": name, "dtype": "BF16", "shape": [100, 100], "digest": DIGEST, "encoding": encoding, "file": file,
                "changed": ELEMENTS if is_full else changed(version, place),
            }
            for place, name in enumerate(names)
        ]  # fmt: skip
        body = {
            "kind": "weights", "format": [1, 0], "version": version, "incarnation": 1, "weights_digest": DIGEST,
            "artefact": "keyframe" if is_full else "delta", "parent": None if is_full else version - 1,
            "keyframe": file if is_full else None, "tensors": tensors, "tied": {},
            "files": [{"path": file, "bytes": 50_000 if is_full else 1000, "digest": DIGEST}],
            "created_at": "2026-01-01T00:00:00Z", "record_digest": DIGEST,
        }  # fmt: skip
        layout.weights_version(version).mkdir(parents=True, exist_ok=True)
        layout.weights_manifest(version).write_bytes(canonical_json(body))
