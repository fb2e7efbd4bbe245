"""Manifests of many versions, without any payload: as many as a long run has, in a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from milesbatch.records import FileRef, TensorEntry, WeightsManifest, digest_bytes
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
        file = FileRef(path="keyframe.x" if is_full else "delta.x", bytes=50_000 if is_full else 1000, digest=DIGEST)
        entries = tuple(
            TensorEntry.model_construct(
                name=name, dtype="BF16", shape=(100, 100), digest=DIGEST, encoding="raw" if is_full else "steps-zstd",
                changed=ELEMENTS if is_full else changed(version, place), file=file.path,
            )
            for place, name in enumerate(names)
        )  # fmt: skip
        manifest = WeightsManifest.model_construct(
            version=version, incarnation=1, artefact="keyframe" if is_full else "delta",
            parent=None if is_full else version - 1, keyframe=file.path if is_full else None, weights_digest=DIGEST,
            tensors=entries, tied={}, files=(file,),
            created_at="2026-01-01T00:00:00Z",
        )  # fmt: skip
        layout.weights_version(version).mkdir(parents=True, exist_ok=True)
        layout.weights_manifest(version).write_bytes(manifest.to_bytes())
