"""A follower of weights in Miles' layout, from the description in ``docs/format-miles.md`` alone: nothing of ours is imported.

It does what the page says of engines: a local model directory is patched in place, version by version.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import xxhash
import zstandard


def read_safetensors(path: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Tensor -> begin and end in the file; and the metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    at = 8 + length
    return {name: (at + row["data_offsets"][0], at + row["data_offsets"][1]) for name, row in header.items()}, metadata


class Puller:
    """One engine host: ``local`` follows ``source``; ``base`` is the model that the engine was started with."""

    def __init__(self, local: Path, base: Path, source: Path) -> None:
        self.local, self.base, self.source = local, base, source
        self.version: int | None = None
        self.applied: list[str] = []

    def pull(self, target: int) -> None:
        start = target
        floor = 0 if self.version is None else self.version
        while start > floor and self._is_delta(start):
            start -= 1
        if self.version is None or start > self.version:
            self._copy(self.base if start == 0 else self._directory(start), start)
        while self.version is not None and self.version < target:
            self._apply(self.version + 1)

    def _directory(self, version: int) -> Path:
        return self.source / f"weight_v{version:06d}"

    def _is_delta(self, version: int) -> bool:
        index = self._directory(version) / "model.safetensors.index.json"
        return "delta_encoding" in json.loads(index.read_text())["metadata"]

    def _copy(self, directory: Path, version: int) -> None:
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir()
        for path in directory.iterdir():
            if path.is_file():
                shutil.copy(path, self.local)
        self.version = version
        self.applied.append(f"full {version}")

    def _apply(self, version: int) -> None:
        index = json.loads((self._directory(version) / "model.safetensors.index.json").read_text())
        metadata = index["metadata"]
        assert (metadata["version"], metadata["base_version"]) == (f"{version:06d}", f"{version - 1:06d}")
        assert metadata["delta_encoding"] == "xor"
        assert metadata["compression_format"] == "zstd" and metadata["checksum_format"] == "xxh3-128"
        (target,) = self.local.glob("*.safetensors")
        places, _ = read_safetensors(target)
        weights = np.frombuffer(target.read_bytes(), np.uint8).copy()
        for file in sorted(set(index["weight_map"].values())):
            path = self._directory(version) / file
            blobs, checksums = read_safetensors(path)
            assert set(blobs) == {name for name, where in index["weight_map"].items() if where == file}
            for name, (begin, end) in blobs.items():
                difference = zstandard.ZstdDecompressor().decompress(path.read_bytes()[begin:end])
                first, last = places[name]
                weights[first:last] ^= np.frombuffer(difference, np.uint8)
                assert xxhash.xxh3_128_hexdigest(weights[first:last].tobytes()) == checksums[name], name
        target.write_bytes(weights.tobytes())
        self.version = version
        self.applied.append(f"delta {version}")

    def tensors(self) -> dict[str, bytes]:
        (path,) = self.local.glob("*.safetensors")
        data = path.read_bytes()
        return {name: data[begin:end] for name, (begin, end) in read_safetensors(path)[0].items()}
