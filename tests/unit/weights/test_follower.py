"""Following: which way is taken, what damage does, and that only proven copies become visible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from milesbatch.errors import CorruptArtefactError, FormatVersionError, StorageError
from milesbatch.records import FileRef, TensorEntry, WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights import folding
from milesbatch.weights import rebuild as rebuild_module
from milesbatch.weights.follower import Follower, VerifiedWeights
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import Step, plan_chain, read_manifest

Tensors = dict[str, torch.Tensor]
Make = Callable[[int], Tensors]
Damage = Callable[[int, str], Path]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records each step that is read, as ``k3`` or ``d4``."""
    taken: list[str] = []
    for letter, name in (("k", "read_keyframe"), ("d", "read_link")):
        read = getattr(rebuild_module, name)

        def record(layout: RunLayout, manifest: WeightsManifest, letter: str = letter, read: object = read) -> object:
            taken.append(f"{letter}{manifest.version}")
            return read(layout, manifest)  # type: ignore[operator]

        monkeypatch.setattr(rebuild_module, name, record)
    return taken


def assert_is(weights: VerifiedWeights, version: int, make: Make) -> None:
    expected, found = make(version), weights.tensors()
    assert weights.version == version
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name


def test_every_version_is_reached_from_every_other(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    for start in range(7):
        for target in range(7):
            follower = Follower(layout)
            follower.advance_to(start)
            assert_is(follower.advance_to(target), target, version_tensors)
            assert follower.current is not None and follower.current.version == target


def test_one_that_keeps_up_reads_only_deltas(
    layout: RunLayout, chain: Publisher, version_tensors: Make, steps: list[str]
) -> None:
    follower = Follower(layout)
    for version in range(7):
        assert_is(follower.advance_to(version), version, version_tensors)
    assert steps == ["k0", "d1", "d2", "d3", "d4", "d5", "d6"]


def test_a_new_one_jumps_to_the_newest_keyframe(layout: RunLayout, chain: Publisher, steps: list[str]) -> None:
    Follower(layout).advance_to(5)
    assert steps == ["k3", "d4", "d5"]


def test_one_that_starts_late_in_a_long_run_reads_one_keyframe_and_the_deltas_after_it(
    layout: RunLayout, steps: list[str]
) -> None:
    publisher = Publisher(layout, 1, keyframe_every=50, before_commit=lambda: None)
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for version in range(501):
        weights[version % 7 :: 97] += 2.0 ** -(version % 11)
        publisher.publish(version, [("w", weights)], {})
    for version, keyframe in ((500, 500), (499, 450), (451, 450)):
        steps.clear()
        assert Follower(layout).advance_to(version).version == version
        assert steps == [f"k{keyframe}", *(f"d{number}" for number in range(keyframe + 1, version + 1))]


def test_a_chain_that_is_too_large_to_be_held_is_applied_in_parts(
    layout: RunLayout, chain: Publisher, version_tensors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild_module, "_FOLD_BYTES", 1)
    follower = Follower(layout)
    first = follower.advance_to(1)
    assert_is(follower.advance_to(2), 2, version_tensors)
    assert_is(follower.advance_to(5), 5, version_tensors)
    assert_is(first, 1, version_tensors)


def test_threads_give_what_one_thread_gives(
    layout: RunLayout, chain: Publisher, version_tensors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "_WORTH_THREADS", 0)
    monkeypatch.setattr(folding.os, "sched_getaffinity", lambda pid: range(5))
    follower = Follower(layout)
    for version in (1, 2, 5):
        assert_is(follower.advance_to(version), version, version_tensors)


def test_earlier_results_stay_as_they_were(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    follower = Follower(layout)
    earlier = follower.advance_to(1)
    follower.advance_to(2)
    assert_is(earlier, 1, version_tensors)


def test_a_damaged_delta_is_passed_by_way_of_a_keyframe(
    layout: RunLayout, chain: Publisher, version_tensors: Make, damage: Damage, steps: list[str]
) -> None:
    follower = Follower(layout)
    follower.advance_to(1)
    damage(2, "delta")
    steps.clear()
    assert_is(follower.advance_to(4), 4, version_tensors)
    assert steps == ["d2", "k3", "d4"]


def test_a_damaged_keyframe_is_passed_by_way_of_an_older_one(
    layout: RunLayout, chain: Publisher, version_tensors: Make, damage: Damage, steps: list[str]
) -> None:
    damage(6, "keyframe")
    assert_is(Follower(layout).advance_to(6), 6, version_tensors)
    assert steps == ["k6", "k3", "d4", "d5", "d6"]


def test_without_another_way_the_error_names_the_file_and_the_old_copy_stays(
    layout: RunLayout, chain: Publisher, version_tensors: Make, damage: Damage
) -> None:
    follower = Follower(layout)
    follower.advance_to(3)
    path = damage(5, "delta")
    with pytest.raises(CorruptArtefactError, match="policy version 5 cannot be rebuilt") as caught:
        follower.advance_to(5)
    assert str(path) in str(caught.value)
    assert follower.current is not None
    assert_is(follower.current, 3, version_tensors)
    assert_is(follower.advance_to(4), 4, version_tensors)


def test_a_local_copy_that_was_written_to_is_noticed(
    layout: RunLayout, chain: Publisher, version_tensors: Make, steps: list[str]
) -> None:
    follower = Follower(layout)
    follower.advance_to(4).tensors()["frozen"].fill_(9.0)
    steps.clear()
    assert_is(follower.advance_to(5), 5, version_tensors)
    assert steps == ["d5", "k3", "d4", "d5"]


def test_a_damaged_manifest_in_between_is_no_obstacle_where_a_keyframe_follows(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    follower = Follower(layout)
    follower.advance_to(1)
    layout.weights_manifest(2).write_bytes(layout.weights_manifest(2).read_bytes()[:-20])
    assert_is(follower.advance_to(4), 4, version_tensors)
    with pytest.raises(CorruptArtefactError, match=str(layout.weights_manifest(2))):
        follower.advance_to(2)


def forge(layout: RunLayout, version: int, **changes: object) -> None:
    """Replace a manifest by one that is well formed but says something else."""
    manifest = read_manifest(layout, version)
    assert manifest is not None
    path = layout.weights_manifest(version)
    path.unlink()
    path.write_bytes(manifest.model_copy(update=changes).to_bytes())


def test_manifests_that_do_not_fit_their_payload_are_corrupt(layout: RunLayout, chain: Publisher) -> None:
    manifest = read_manifest(layout, 1)
    assert manifest is not None
    by_name = {entry.name: entry for entry in manifest.tensors}
    layer = by_name["layer.weight"]
    wrong: list[dict[str, object]] = [
        {"shape": (48, 128)},
        {"dtype": "I32"},
        {"dtype": "Q4"},
        {"digest": by_name["frozen"].digest},
        {"encoding": "xor-zstd"},
        {"encoding": "raw"},
        {"name": "other"},
        {"shape": (10**9, 10**9)},
    ]
    for change in wrong:
        other = layer.model_copy(update=change)
        forge(layout, 1, tensors=tuple(other if e.name == layer.name else e for e in manifest.tensors))
        with pytest.raises(CorruptArtefactError, match="policy version 1 cannot be rebuilt"):
            Follower(layout).advance_to(1)
    forge(layout, 1, tensors=manifest.tensors, weights_digest="xxh128:" + 32 * "0")
    with pytest.raises(CorruptArtefactError, match="states xxh128:0000"):
        Follower(layout).advance_to(1)


def test_a_manifest_that_contradicts_itself_is_never_used(layout: RunLayout, chain: Publisher) -> None:
    manifest = read_manifest(layout, 1)
    assert manifest is not None
    outside = FileRef(path="../000000/x", bytes=1, digest="xxh128:" + 32 * "0")
    for changes in (
        {"parent": 5},
        {"parent": None},
        {"keyframe": "x"},
        {"files": ()},
        {"files": (*manifest.files, outside)},
    ):
        forge(layout, 1, **changes)
        # Its digest is right, so it is not called damaged (and moved away); it is refused all the same.
        with pytest.raises(FormatVersionError, match=str(layout.weights_manifest(1))):
            read_manifest(layout, 1)
        forge_whole(layout, manifest)
    layout.weights_manifest(1).write_bytes(layout.weights_manifest(2).read_bytes())
    with pytest.raises(CorruptArtefactError, match="manifest of version 2"):
        read_manifest(layout, 1)


def forge_whole(layout: RunLayout, manifest: WeightsManifest) -> None:
    layout.weights_manifest(manifest.version).write_bytes(manifest.to_bytes())


def test_what_is_not_published_or_not_accepted(layout: RunLayout, chain: Publisher) -> None:
    follower = Follower(layout, accept=lambda manifest: manifest.version != 4)
    assert [follower.is_published(version) for version in (3, 4, 5, 7)] == [True, False, True, False]
    for version in (4, 7):
        with pytest.raises(StorageError, match=f"version {version} is not published"):
            follower.advance_to(version)
    with pytest.raises(CorruptArtefactError, match="version 5 cannot be rebuilt"):
        follower.advance_to(5)
    assert follower.advance_to(6).version == 6
    layout.weights_version(8).mkdir()
    (layout.weights_version(8) / "keyframe.i000001.safetensors").write_bytes(b"half")
    assert not follower.is_published(8)


def test_a_version_published_anew_after_its_loss_replaces_the_local_one(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    follower = Follower(layout)
    old = follower.advance_to(4)
    for version in (4, 5, 6):
        layout.weights_version(version).rename(layout.quarantine / str(version))
    chain.seed(3)
    for version in (4, 5):
        tensors = version_tensors(version)
        tensors["scalar"] += 100
        chain.publish(version, tensors.items(), {})
    assert follower.advance_to(4).weights_digest != old.weights_digest
    assert float(follower.advance_to(5).tensors()["scalar"]) == 106.5


# -- the plan, on made-up manifests ---------------------------------------------------------------------------------


def manifest_of(version: int, *, keyframe: int | None = None, delta: int | None = None) -> WeightsManifest:
    sizes = {"k": keyframe, "d": delta}
    files = tuple(FileRef(path=name, bytes=size, digest="") for name, size in sizes.items() if size is not None)
    has_delta = delta is not None
    entry = TensorEntry(
        name="w",
        dtype="F32",
        shape=(1,),
        digest="",
        encoding="xor-zstd" if has_delta else "raw",
        changed=1,
        file="d" if has_delta else "k",
    )
    return WeightsManifest(
        version=version,
        incarnation=1,
        artefact="delta" if keyframe is None else "keyframe",
        parent=version - 1 if has_delta else None,
        keyframe=None if keyframe is None else "k",
        weights_digest="",
        tensors=(entry,),
        tied={},
        files=files,
        created_at="",
    )


def spelled(manifests: list[WeightsManifest], target: int, **options: object) -> tuple[list[str], int] | None:
    plan = plan_chain({m.version: m for m in manifests}.get, target, **options)  # type: ignore[arg-type]
    return None if plan is None else ([f"{s.kind[0]}{s.version}" for s in plan.steps], plan.num_bytes)


def test_the_plan_counts_bytes() -> None:
    manifests = [
        manifest_of(0, keyframe=100),
        *(manifest_of(version, delta=10) for version in range(1, 6)),
        manifest_of(6, keyframe=100, delta=40),
        manifest_of(7, delta=40),
        manifest_of(8, delta=40),
    ]
    assert spelled(manifests, 8) == (["k6", "d7", "d8"], 180)
    assert spelled(manifests, 8, local=7) == (["d8"], 40)
    assert spelled(manifests, 8, local=4) == (["d5", "d6", "d7", "d8"], 130)
    assert spelled(manifests, 6, local=5) == (["d6"], 40)
    assert spelled(manifests, 6, local=0) == (["d1", "d2", "d3", "d4", "d5", "d6"], 90)
    assert spelled(manifests, 8, local=8) == ([], 0)
    assert spelled(manifests, 4, local=7) == (["k0", "d1", "d2", "d3", "d4"], 140)
    assert spelled(manifests, 9) is None


def test_the_plan_prefers_a_keyframe_that_is_cheaper_than_the_deltas() -> None:
    manifests = [manifest_of(0, keyframe=100), *(manifest_of(v, delta=60, keyframe=100) for v in (1, 2, 3))]
    assert spelled(manifests, 3, local=1) == (["k3"], 100)
    assert spelled(manifests, 3, local=2) == (["d3"], 60)


def test_the_plan_avoids_what_is_unusable() -> None:
    manifests = [manifest_of(0, keyframe=100), manifest_of(1, delta=10), manifest_of(2, keyframe=100, delta=10)]
    assert spelled(manifests, 2, unusable={Step(2, "keyframe")}) == (["k0", "d1", "d2"], 120)
    assert spelled(manifests, 2, local=1, unusable={Step(2, "delta")}) == (["k2"], 100)
    assert spelled(manifests, 2, unusable={Step(2, "keyframe"), Step(1, "delta")}) is None
    assert spelled(manifests[1:], 1) is None


def test_the_manifest_on_disk_is_what_the_format_page_says(layout: RunLayout, chain: Publisher) -> None:
    body = json.loads(layout.weights_manifest(3).read_bytes())
    assert (body["kind"], body["artefact"], body["parent"], body["version"]) == ("weights", "keyframe", 2, 3)
    assert {ref["path"].split(".")[0] for ref in body["files"]} == {"keyframe", "delta"}
