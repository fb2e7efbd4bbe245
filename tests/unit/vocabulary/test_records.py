"""Records: what was written is read again, and no damage of any kind passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_batch, make_incarnation, make_ref, make_rejection
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.errors import CorruptArtefactError, FormatVersionError
from milesbatch.records import (
    BatchRecord,
    CheckpointManifest,
    FileRef,
    Record,
    RunRecord,
    Seal,
    TensorEntry,
    WeightsManifest,
    canonical_json,
    digest_bytes,
)

AT = "2026-03-01T12:00:00.000000Z"
PAYLOAD = FileRef(path="keyframe.safetensors", bytes=12, digest=digest_bytes(b"k"))


def tensor(**changes: Any) -> TensorEntry:
    values: dict[str, Any] = {
        "name": "w",
        "dtype": "F32",
        "shape": (3, 1),
        "digest": digest_bytes(b"w"),
        "encoding": "raw",
        "changed": 3,
        "file": PAYLOAD.path,
    }
    return TensorEntry(**{**values, **changes})


def weights(**changes: Any) -> WeightsManifest:
    values: dict[str, Any] = {
        "version": 3,
        "incarnation": 2,
        "artefact": "keyframe",
        "parent": None,
        "keyframe": PAYLOAD.path,
        "weights_digest": digest_bytes(b"all"),
        "tensors": (tensor(),),
        "tied": {"head": "w"},
        "files": (PAYLOAD,),
        "created_at": AT,
    }
    return WeightsManifest(**{**values, **changes})


ALL: list[Record] = [
    RunRecord(
        run_id="r-1",
        name="näme ☃",
        recipe_digest=digest_bytes(b"r"),
        created_at=AT,
        fingerprints={"model": "x", "data": "y"},
        files=(FileRef(path="recipe.yaml", bytes=3, digest=digest_bytes(b"abc")),),
    ),
    make_incarnation(
        3,
        recipe_changes={"steps": 5, "checkpoint.every": None, "x": [1, 1e-4, True, {"deep": "é"}]},
        seal=Seal(last_batch=4, last_version=3, checkpoints=(2, 4), trajectories=("a", "b")),
    ),
    make_batch(2, [make_ref(4), make_ref(5, 1, 2)], [make_rejection(6, "zero_variance")], incarnation=3),
    weights(),
    CheckpointManifest(
        step=4,
        incarnation=1,
        policy_version=4,
        weights_digest=digest_bytes(b"all"),
        world_size=2,
        files=(PAYLOAD,),
        stream_position=16,
        fates_since=2,
        fates={"4": "trained(2)", "6": "rejected(stale, 2)"},
        pending=(make_ref(17, 3),),
        divergences=(3,),
        created_at=AT,
    ),
]
KINDS = [type(record) for record in ALL]
records = pytest.mark.parametrize("record", ALL, ids=[record.kind for record in ALL])


def forged(record: Record, **changes: Any) -> bytes:
    """Bytes with other keys whose digest is right: what a newer or a broken writer would leave."""
    import json

    body = {**json.loads(record.to_bytes()), **changes}
    body = {key: value for key, value in body.items() if value is not ... and key != "record_digest"}
    return canonical_json({**body, "record_digest": digest_bytes(canonical_json(body))})


@records
def test_roundtrip(record: Record) -> None:
    assert type(record).from_bytes(record.to_bytes(), "p") == record
    assert type(record).from_bytes(record.to_bytes(), "p").to_bytes() == record.to_bytes()


@records
@pytest.mark.parametrize("bit", [0x01, 0x10, 0x20, 0x80])
def test_every_flipped_byte_is_found(record: Record, bit: int) -> None:
    whole = record.to_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= bit
        with pytest.raises(CorruptArtefactError, match=r"some/where\.json"):
            type(record).from_bytes(bytes(damaged), "some/where.json")


@records
def test_every_truncation_and_appendix_is_found(record: Record) -> None:
    whole = record.to_bytes()
    for damaged in [*(whole[:size] for size in range(len(whole))), whole + b"\n", whole + b"\0", whole + whole]:
        with pytest.raises(CorruptArtefactError, match=r"some/where\.json"):
            type(record).from_bytes(damaged, "some/where.json")


@pytest.mark.parametrize(
    "record", [*ALL, weights(tensors=(tensor(), tensor(name="v")))], ids=lambda record: record.kind
)
def test_a_record_that_is_cut_short_may_still_appear(record: Record) -> None:
    """Also where it ends, by chance, behind a part with a brace of its own."""
    whole = record.to_bytes()
    for end in range(len(whole)):
        with pytest.raises(CorruptArtefactError) as caught:
            type(record).from_bytes(whole[:end], "x.json")
        assert caught.value.unseen == Path("x.json"), whole[:end]


@given(st.binary(max_size=200))
def test_noise_is_never_a_record(noise: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(CorruptArtefactError):
            kind.from_bytes(noise, "p")


@pytest.mark.parametrize("text", [b"null", b"[]", b"3", b"{}", b'"x"', b"[" * 5000, b'{"record_digest": 1}', b"NaN"])
def test_other_json_is_not_a_record(text: bytes) -> None:
    with pytest.raises(CorruptArtefactError):
        BatchRecord.from_bytes(text, "p")


@records
def test_the_same_content_spelled_otherwise_is_refused(record: Record) -> None:
    import json

    with pytest.raises(CorruptArtefactError):
        type(record).from_bytes(json.dumps(json.loads(record.to_bytes())).encode(), "p")


@records
def test_wrong_kind(record: Record) -> None:
    for kind in KINDS:
        if kind is not type(record):
            with pytest.raises(CorruptArtefactError, match="p: holds another kind"):
                kind.from_bytes(record.to_bytes(), "p")


@records
def test_newer_major_version_is_not_called_damage(record: Record) -> None:
    with pytest.raises(FormatVersionError, match="p: format 2 is newer"):
        type(record).from_bytes(forged(record, format=[2, 0], new_key=1), "p")
    with pytest.raises(FormatVersionError):
        type(record).from_bytes(forged(record, format=[2, 0], kind="another"), "p")


@records
def test_newer_minor_version_with_a_key_that_is_not_known(record: Record) -> None:
    """It is whole and somebody newer can read it, so it must not be called damaged (and then quarantined)."""
    with pytest.raises(FormatVersionError, match=r"1\.7"):
        type(record).from_bytes(forged(record, format=[1, 7], new_key=1), "p")
    assert type(record).from_bytes(forged(record, format=[1, 7]), "p") == record


@pytest.mark.parametrize(
    "changes",
    [
        {"format": ...},
        {"format": []},
        {"format": "1"},
        {"format": ["1", "0"]},
        {"format": None},
        {"kind": ...},
        {"kind": ["batch"]},
    ],
)
def test_a_right_digest_does_not_make_a_record(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptArtefactError, match=r"^p: "):
        BatchRecord.from_bytes(forged(ALL[2], **changes), "p")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step": ...}, "step"),
        ({"step": "one"}, "step"),
        ({"unknown": 1}, "unknown"),
        ({"trained": [{"group_id": 1}]}, r"trained\.0"),
    ],
)
def test_a_whole_record_that_is_not_understood_is_not_called_damaged(changes: dict[str, Any], field: str) -> None:
    """What is called damaged is moved to quarantine, and all that follows it is made again."""
    with pytest.raises(FormatVersionError, match=rf"^p is whole.*{field}"):
        BatchRecord.from_bytes(forged(ALL[2], **changes), "p")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (PAYLOAD.model_copy(update={"path": "../../run.json"}),)},
        {"artefact": "delta"},
        {"keyframe": None},
        {"parent": 1},
        {"files": ()},
        {"tensors": (tensor(shape=(-3, 1)),)},
        {"tensors": (tensor(encoding="xor-zstd"),)},
        {"tensors": (tensor(encoding="same"),)},
        {"tensors": (tensor(file=None),)},
        {"tensors": (tensor(file="elsewhere"),)},
    ],
)
def test_inconsistent_weights_manifest(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        weights(**changes)


def test_records_are_frozen() -> None:
    with pytest.raises(ValueError):
        ALL[0].name = "other"  # type: ignore[attr-defined]
