"""Import from Miles' layout: bit for bit, proven before use; whatever is cut short or contradicts itself is named."""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path

import pytest
import zstandard
from miles_made import (
    DELTA,
    INDEX,
    bits,
    export_all,
    make_tensors,
    publish,
    publish_peer,
    write_blobs,
)

from milesbatch.errors import CorruptArtefactError, InputError, MilesbatchError
from milesbatch.store.layout import RunLayout
from milesbatch.weights.miles_import import rebuild_published


@pytest.mark.parametrize("seed", range(4))
def test_every_version_comes_back_bit_for_bit(layout: RunLayout, tmp_path: Path, seed: int) -> None:
    (layout.model / "config.json").write_text("{}")
    publish(layout, range(6), seed)
    export_all(layout, tmp_path / "out")
    for version in range(6):
        rebuilt = rebuild_published(tmp_path / "out", version)
        tensors = make_tensors(seed, version)
        assert {name: tensor.data.tobytes() for name, tensor in rebuilt.tensors.items()} == bits(tensors)
        assert {name: tensor.shape for name, tensor in rebuilt.tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }
        assert (rebuilt.deltas, rebuilt.unproven) == (version, ())


def test_every_truncation_is_refused_and_the_file_is_named(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out, None, 2)
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    assert len(files) == 4 + 2 * 2
    for path in files:
        data = path.read_bytes()
        for length in range(len(data) - 1 if path.name == INDEX else len(data)):  # an index ends with a line end
            path.write_bytes(data[:length])
            with pytest.raises(CorruptArtefactError) as caught:
                rebuild_published(out, 2)
            assert str(path) in caught.value.what and len(caught.value.what.splitlines()) == 1
        path.unlink()
        if path != out / "weight_v000000" / INDEX:  # a single file without an index is a full checkpoint too
            with pytest.raises(MilesbatchError, match=path.name.replace(".", r"\.")):
                rebuild_published(out, 2)
        path.write_bytes(data)
    assert rebuild_published(out, 2).deltas == 2


def test_a_flipped_bit_never_gives_other_weights(small_run: RunLayout, tmp_path: Path) -> None:
    out, chance = tmp_path / "out", random.Random(3)
    export_all(small_run, out, None, 2)
    expected, refused = bits(make_tensors(1, 2)), 0
    for path in [path for path in sorted(out.rglob("*")) if path.is_file()]:
        data = path.read_bytes()
        for _ in range(400):
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            try:
                found = rebuild_published(out, 2).tensors
            except MilesbatchError:
                refused += 1
            else:
                assert {name: tensor.data.tobytes() for name, tensor in found.items()} == expected
        path.write_bytes(data)
    assert refused > 2500


def test_damage_names_the_file_and_the_tensor(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out)
    path = out / "weight_v000002" / DELTA
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # in the last tensor of the file
    path.write_bytes(data)
    with pytest.raises(
        CorruptArtefactError, match=r"weight_v000002/model-00000-of-00001.safetensors .*tensor up\.weight"
    ):
        rebuild_published(out, 5)
    assert rebuild_published(out, 1).deltas == 1


def test_a_damaged_full_checkpoint_is_found_before_a_delta_is_read(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out)
    path = out / "weight_v000000" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (out / "weight_v000001" / DELTA).unlink()
    with pytest.raises(CorruptArtefactError, match=r"weight_v000000/model\.safetensors is damaged"):
        rebuild_published(out, 3)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_what_miles_publishes_is_read(tmp_path: Path, base: Path, encoding: str, checksum: str) -> None:
    publish_peer(tmp_path / "peer", [1, 2, 3], encoding, checksum)
    for version in (1, 3):
        rebuilt = rebuild_published(tmp_path / "peer", version, base)
        found = {name: tensor.data.tobytes() for name, tensor in rebuilt.tensors.items()}
        assert found == bits(make_tensors(1, version))
        assert rebuilt.unproven == ("frozen",) and rebuilt.source == base


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"delta_encoding": "rle"}, "delta encoding 'rle' is not known"),
        ({"compression_format": "lz4"}, "compression 'lz4' is not known"),
        ({"checksum_format": "md5"}, "checksum 'md5' is not known"),
        ({"base_version": "000001"}, "it is of version 1 on version 1"),
        ({"version": "000009"}, "it is of version 9 on version 0"),
        ({"version": "first"}, "it is no index"),
        ({"delta_encoding": None}, "it has base_version, checksum_format, compression_format and no delta_encoding"),
    ],
)
def test_an_index_that_is_not_understood_is_one_line(
    tmp_path: Path, base: Path, index: dict[str, str], words: str
) -> None:
    publish_peer(tmp_path / "peer", [1], index=index)
    with pytest.raises(MilesbatchError) as caught:
        rebuild_published(tmp_path / "peer", 1, base)
    assert words in caught.value.what and str(tmp_path / "peer" / "weight_v000001" / INDEX) in caught.value.what
    assert len(caught.value.what.splitlines()) == 1


def test_blake3_asks_for_its_package(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    publish_peer(tmp_path / "peer", [1], index={"checksum_format": "blake3"})
    with pytest.raises(InputError, match="its checksums are blake3") as caught:
        rebuild_published(tmp_path / "peer", 1, base)
    assert caught.value.mend == "pip install blake3"


@pytest.mark.parametrize(
    ("encoding", "body", "words"),
    [
        ("xor", bytes(31 * 4 - 1), "it has 123 bytes, the tensor 124"),
        ("xor", bytes(1 << 28), "it is longer than the tensor's 124 bytes"),
        ("overwrite", struct.pack("<II", 1, 124) + b"x", "position 124 in a tensor of 124 bytes"),
        ("overwrite", struct.pack("<I", 2) + b"xxxxx", "9 bytes for 2 changes"),
        ("overwrite", bytes(1 << 28), "bytes for 0 changes"),
        ("xor", None, "cannot be applied"),
    ],
)
def test_a_difference_that_does_not_fit_is_refused(
    tmp_path: Path, base: Path, encoding: str, body: bytes | None, words: str
) -> None:
    publish_peer(tmp_path / "peer", [1], encoding)
    directory = tmp_path / "peer" / "weight_v000001"
    blob = b"no frame" if body is None else zstandard.ZstdCompressor().compress(body)
    write_blobs(directory / DELTA, {"norm.weight": blob}, {"norm.weight": "0" * 32})
    index = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(json.dumps({**index, "weight_map": {"norm.weight": DELTA}}))
    with pytest.raises(CorruptArtefactError, match=r"difference of tensor norm\.weight") as caught:
        rebuild_published(tmp_path / "peer", 1, base)
    assert words in caught.value.what and str(directory / DELTA) in caught.value.what


@pytest.mark.parametrize(
    ("weight_map", "sums", "words"),
    [
        ({"norm.weight": "../x.safetensors"}, {}, "no file beside the index"),
        ({"norm.weight": DELTA, "gone": DELTA}, {}, "name different tensors: gone"),
        ({"norm.weight": DELTA}, {}, "states no checksum of tensor norm.weight"),
        ({"stranger": DELTA}, {"stranger": "0"}, "tensor stranger is not in the checkpoint"),
    ],
)
def test_files_and_index_that_contradict_each_other(
    tmp_path: Path, base: Path, weight_map: dict[str, str], sums: dict[str, str], words: str
) -> None:
    publish_peer(tmp_path / "peer", [1])
    directory = tmp_path / "peer" / "weight_v000001"
    name = "stranger" if "stranger" in weight_map else "norm.weight"
    write_blobs(directory / DELTA, {name: zstandard.ZstdCompressor().compress(bytes(124))}, sums)
    index = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}))
    with pytest.raises(CorruptArtefactError, match="weight_v000001") as caught:
        rebuild_published(tmp_path / "peer", 1, base)
    assert words in caught.value.what


def test_a_version_that_is_not_whole_yet_is_refused(tmp_path: Path, base: Path) -> None:
    publish_peer(tmp_path / "peer", [1])
    (tmp_path / "peer" / "weight_v000001" / INDEX).unlink()
    with pytest.raises(CorruptArtefactError, match="not \\(wholly\\) published"):
        rebuild_published(tmp_path / "peer", 1, base)
