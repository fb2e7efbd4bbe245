"""Small runs, and weights as Miles publishes them, for the tests of that layout."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.torch import save_file

from milesbatch.records import Retirement
from milesbatch.store.layout import RunLayout
from milesbatch.weights.miles_export import Exported, Exporter
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import accept_all

Tensors = dict[str, torch.Tensor]
TIED = {"lm_head.weight": "embed.weight"}
INDEX = "model.safetensors.index.json"
DELTA = "model-00000-of-00001.safetensors"


def random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """All bit patterns: NaN payloads, infinities, both zeros."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


def make_tensors(seed: int, version: int) -> Tensors:
    """Version 3 is as version 2; the third dtype never changes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed.weight": random_bits(24 * 9, torch.bfloat16, generator).view(24, 9),
        "norm.weight": random_bits(31, torch.float32, generator),
        "down.weight": random_bits(64, torch.float8_e4m3fn, generator).view(8, 8),
        "up.weight": random_bits(64, torch.float8_e5m2, generator),
        "frozen": random_bits(11, torch.float16, generator),
        "nothing": torch.empty(0, 5),
        "scalar": random_bits(1, torch.float32, generator).view(()),
    }
    for step in range(1, version + 1):
        moves = torch.Generator().manual_seed(1000 * seed + step)
        for name in ("embed.weight", "norm.weight", "down.weight", "up.weight", "scalar") if step != 3 else ():
            data = tensors[name].view(-1).view(torch.uint8)
            where = torch.randint(0, data.numel(), (1 + data.numel() // 40,), generator=moves)
            data[where] ^= torch.randint(1, 256, where.shape, dtype=torch.uint8, generator=moves)
    return tensors


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


def publish(layout: RunLayout, versions: range, seed: int = 1) -> None:
    publisher = Publisher(layout, 1, keyframe_every=4, before_commit=lambda: None)
    if versions[0]:
        publisher.seed(versions[0] - 1)
    for version in versions:
        tensors = make_tensors(seed, version)
        publisher.publish(version, {**tensors, "lm_head.weight": tensors["embed.weight"]}.items(), TIED)


def exporter(layout: RunLayout, out: Path) -> Exporter:
    return Exporter(layout, out, lambda: accept_all)


def export_all(layout: RunLayout, out: Path, first: int | None = None, last: int | None = None) -> list[Exported]:
    one = exporter(layout, out)
    made = [one.export(version) for version in one.due(first, last)]
    assert None not in made
    return [exported for exported in made if exported is not None]


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def retire(layout: RunLayout, version: int) -> None:
    record = Retirement(
        version=version, incarnation=1, base=4, needed=4, checkpoint=9, staleness=1, created_at="2026-01-01T00:00:00Z"
    )
    layout.weights_retirement(version).write_bytes(record.to_bytes())
    for path in layout.weights_version(version).glob("*.safetensors"):
        path.unlink()


def publish_peer(
    out: Path,
    versions: list[int],
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    index: dict[str, Any] | None = None,
) -> None:
    """As Miles writes: no version 0, nothing about the base; from the description, not with our writer."""
    for version in versions:
        old, new = bits(make_tensors(1, version - 1)), bits(make_tensors(1, version))
        blobs, sums = {}, {}
        for name in new:
            before, after = np.frombuffer(old[name], np.uint8), np.frombuffer(new[name], np.uint8)
            where = np.flatnonzero(before != after)
            if not where.size:
                continue
            body = (before ^ after).tobytes()
            if encoding == "overwrite":
                body = struct.pack("<I", where.size) + where.astype("<u4").tobytes() + after[where].tobytes()
            blobs[name] = zstandard.ZstdCompressor(level=1).compress(body)
            sums[name] = xxhash.xxh3_128_hexdigest(new[name])
            if checksum == "adler32":
                sums[name] = f"{zlib.adler32(new[name]):08x}"
        directory = out / f"weight_v{version:06d}"
        directory.mkdir(parents=True)
        write_blobs(directory / DELTA, blobs, sums)
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
            **(index or {}),
        }
        metadata = {key: value for key, value in metadata.items() if value is not None}
        (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(blobs, DELTA)}))


def write_blobs(path: Path, blobs: dict[str, bytes], sums: dict[str, str]) -> None:
    arrays = {name: torch.frombuffer(bytearray(blob), dtype=torch.uint8) for name, blob in blobs.items()}
    save_file(arrays, path, metadata=sums)
