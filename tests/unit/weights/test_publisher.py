"""Publishing: kinds of artefact, the commit and its crash states, idempotence, divergence, restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from milesbatch.errors import DivergenceError, FencedError, StorageError
from milesbatch.records import WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights.digest import entries_digest, weights_digest
from milesbatch.weights.follower import Follower
from milesbatch.weights.listing import verify
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import committed_versions, read_manifest
from milesbatch.weights.rebuild import rebuild

Tensors = dict[str, torch.Tensor]
Make = Callable[[int], Tensors]


def new_publisher(layout: RunLayout, incarnation: int = 1, **changes: object) -> Publisher:
    arguments: dict[str, object] = {"keyframe_every": 3, "before_commit": lambda: None, **changes}
    return Publisher(layout, incarnation, **arguments)  # type: ignore[arg-type]


def published(layout: RunLayout, version: int) -> WeightsManifest:
    manifest = read_manifest(layout, version)
    assert manifest is not None
    return manifest


def test_kinds_and_sizes_of_a_chain(layout: RunLayout, chain: Publisher) -> None:
    manifests = [published(layout, version) for version in range(7)]
    assert [m.artefact for m in manifests] == ["keyframe", "delta", "delta"] * 2 + ["keyframe"]
    assert [m.parent for m in manifests] == [None, 0, 1, 2, 3, 4, 5]
    encodings = {entry.name: entry.encoding for entry in manifests[1].tensors}
    assert encodings["frozen"] == encodings["empty"] == "same"
    assert encodings["layer.weight"] == "steps-zstd"
    changed = {entry.name: entry.changed for entry in manifests[1].tensors}
    assert (changed["layer.weight"], changed["scalar"], changed["frozen"]) == (122, 1, 0)
    assert sum(ref.bytes for ref in manifests[1].files) < 0.1 * sum(ref.bytes for ref in manifests[0].files)
    assert all(ref.path.startswith(("keyframe.i000001.", "delta.i000001.")) for m in manifests for ref in m.files)
    assert len({m.weights_digest for m in manifests}) == 7


def test_a_keyframe_is_a_plain_safetensors_file(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    manifest = published(layout, 3)
    loaded = load_file(layout.weights_version(3) / str(manifest.keyframe))
    expected = version_tensors(3)
    assert set(loaded) == set(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_digest_is_over_names_dtypes_shapes_and_bytes(chain: Publisher, version_tensors: Make) -> None:
    digests = {chain.digest_only(version_tensors(2).items())}
    for change in ("name", "dtype", "shape", "bits"):
        tensors = version_tensors(2)
        layer = tensors.pop("layer.weight")
        layer[0, 0] = 0.0
        tensors["other" if change == "name" else "layer.weight"] = {
            "name": version_tensors(2)["layer.weight"],
            "dtype": version_tensors(2)["layer.weight"].view(torch.int32),
            "shape": version_tensors(2)["layer.weight"].reshape(48, 128),
            "bits": torch.where(layer == 0.0, -0.0, layer),
        }[change]
        digests.add(chain.digest_only(tensors.items()))
    assert len(digests) == 5


def test_the_digest_depends_on_neither_order_nor_memory_layout(layout: RunLayout, version_tensors: Make) -> None:
    publisher = new_publisher(layout)
    tensors = version_tensors(1)
    strided = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in reversed(tensors.items())}
    manifest = publisher.publish(0, tensors.items(), {})
    assert publisher.digest_only(strided.items()) == manifest.weights_digest == entries_digest(manifest.tensors)
    with pytest.raises(ValueError, match="twice: w"):
        weights_digest([("w", "F32", (), "a"), ("w", "F32", (), "b")])


def test_consumes_one_tensor_at_a_time_and_keeps_no_memory_of_the_caller(layout: RunLayout) -> None:
    publisher = new_publisher(layout)
    shared = torch.zeros(100)

    def named(values: tuple[float, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, value in enumerate(values):
            shared.fill_(value)
            yield f"w{number}", shared
            shared.fill_(-1.0)

    publisher.publish(0, named((1.0, 2.0)), {})
    publisher.publish(1, named((1.0, 3.0)), {})
    assert [rebuild(layout, 1).tensors[f"w{n}"].data.view("<f4")[0] for n in (0, 1)] == [1.0, 3.0]


def test_dense_changes_become_a_keyframe(layout: RunLayout) -> None:
    publisher = new_publisher(layout, keyframe_every=100)
    for version in range(2):
        tensors = {"w": torch.randn(2_000, generator=torch.Generator().manual_seed(version))}
        manifest = publisher.publish(version, tensors.items(), {})
    assert (manifest.artefact, manifest.parent) == ("keyframe", None)


def test_a_chain_that_costs_more_than_a_full_copy_gets_one(layout: RunLayout) -> None:
    """Also when it was begun by a publisher of an earlier start."""
    weights = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    kinds = []
    publisher = new_publisher(layout, keyframe_every=100)
    for version in range(14):
        if version == 6:
            publisher = new_publisher(layout, 2, keyframe_every=100)
            publisher.seed(5)
        weights.view(torch.int16)[version % 2 :: 3] += 1 + 7 * (torch.arange(20_000) % 50)[version % 2 :: 3].to(
            torch.int16
        )
        manifest = publisher.publish(version, [("w", weights)], {})
        kinds.append(manifest.artefact)
        assert manifest.parent == (version - 1 if version else None)
    spent, expected = 0, []
    for version in range(14):
        manifest = published(layout, version)
        delta = sum(ref.bytes for ref in manifest.files if ref.path != manifest.keyframe)
        spent = 0 if version == 0 or spent + delta - 200 > 40_000 else spent + delta
        expected.append("delta" if spent else "keyframe")
    assert kinds == expected and kinds.count("keyframe") >= 3
    assert not list(verify(layout))


def test_another_set_of_tensors_becomes_a_keyframe(layout: RunLayout, version_tensors: Make) -> None:
    publisher = new_publisher(layout, keyframe_every=100)
    publisher.publish(0, version_tensors(0).items(), {})
    fewer = version_tensors(1)
    del fewer["frozen"]
    assert publisher.publish(1, fewer.items(), {}).parent is None
    reshaped = {**fewer, "layer.weight": fewer["layer.weight"].reshape(-1)}
    assert publisher.publish(2, reshaped.items(), {}).parent is None
    assert not list(verify(layout))


def test_nothing_changed_needs_no_payload(layout: RunLayout, version_tensors: Make) -> None:
    publisher = new_publisher(layout)
    first = publisher.publish(0, version_tensors(0).items(), {})
    second = publisher.publish(1, version_tensors(0).items(), {})
    assert (second.files, second.artefact) == ((), "delta")
    assert rebuild(layout, 1).manifest.weights_digest == first.weights_digest


def test_publishing_again_is_a_comparison(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    before = {path: path.read_bytes() for path in layout.weights.rglob("*") if path.is_file()}
    replayed = new_publisher(layout, 2)
    replayed.seed(2)
    for version in range(3, 7):
        assert replayed.publish(version, version_tensors(version).items(), {}).incarnation == 1
    assert {path: path.read_bytes() for path in layout.weights.rglob("*") if path.is_file()} == before
    assert replayed.publish(7, version_tensors(7).items(), {}).parent == 6


def test_divergence_names_version_and_digests_and_writes_nothing(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    other = version_tensors(4)
    other["scalar"] += 1
    replayed = new_publisher(layout, 2)
    replayed.seed(3)
    with pytest.raises(DivergenceError) as caught:
        replayed.publish(4, other.items(), {})
    message = str(caught.value)
    assert "policy version 4" in message
    assert published(layout, 4).weights_digest in message and replayed.digest_only(other.items()) in message
    assert replayed.snapshot_version == 3
    assert not list(verify(layout))


def test_after_a_restart_without_seed_a_keyframe_and_with_seed_a_delta(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    seeded = new_publisher(layout, 2)
    assert seeded.seed(6).version == 6
    assert seeded.publish(7, version_tensors(7).items(), {}).artefact == "delta"
    unseeded = new_publisher(layout, 3)
    assert unseeded.publish(8, version_tensors(8).items(), {}).artefact == "keyframe"
    assert not list(verify(layout))


def test_seed_of_an_unpublished_version_says_so(layout: RunLayout) -> None:
    with pytest.raises(StorageError, match="policy version 5 is not published"):
        new_publisher(layout).seed(5)


def test_a_gap_is_refused_before_anything_is_consumed(layout: RunLayout, chain: Publisher) -> None:
    def named() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("consumed")
        yield

    with pytest.raises(ValueError, match=r"the snapshot is version 6: publish in order, or seed\(7\) first"):
        chain.publish(8, named(), {})
    assert committed_versions(layout) == list(range(7))


def test_killed_between_payload_and_manifest(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover
        dying = new_publisher(layout, before_commit=lambda: os.kill(os.getpid(), signal.SIGKILL))
        dying.seed(6)
        other = version_tensors(7)
        other["scalar"] += 5
        dying.publish(7, other.items(), {})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    leftover = list(layout.weights_version(7).glob("delta.i000001.*"))
    assert len(leftover) == 1 and read_manifest(layout, 7) is None
    assert committed_versions(layout) == list(range(7))
    manifest = chain.publish(7, version_tensors(7).items(), {})
    assert not leftover[0].exists()
    assert rebuild(layout, 7).manifest == manifest
    assert not list(verify(layout))


def test_a_writer_of_the_same_bytes_uses_what_a_dead_one_left(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    dying = new_publisher(layout, before_commit=die)
    dying.seed(6)
    with pytest.raises(KeyboardInterrupt):
        dying.publish(7, version_tensors(7).items(), {})
    assert dying.snapshot_version == 6
    manifest = chain.publish(7, version_tensors(7).items(), {})
    assert [path.name for path in layout.weights_version(7).glob("*.safetensors")] == [manifest.files[0].path]
    assert not list(verify(layout))


def test_a_fenced_writer_commits_nothing(layout: RunLayout, chain: Publisher, version_tensors: Make) -> None:
    def fenced() -> None:
        raise FencedError("incarnation 2 has taken over")

    old = new_publisher(layout, before_commit=fenced)
    old.seed(6)
    with pytest.raises(FencedError):
        old.publish(7, version_tensors(7).items(), {})
    assert read_manifest(layout, 7) is None


@pytest.mark.parametrize("same", [True, False])
def test_a_twin_that_commits_first_wins(layout: RunLayout, version_tensors: Make, same: bool) -> None:
    twin = new_publisher(layout, 1)

    def twin_commits() -> None:
        twin.publish(0, version_tensors(0 if same else 1).items(), {})

    late = new_publisher(layout, 2, before_commit=twin_commits)
    if same:
        assert late.publish(0, version_tensors(0).items(), {}).incarnation == 1
    else:
        with pytest.raises(DivergenceError, match="incarnation 1"):
            late.publish(0, version_tensors(0).items(), {})
    assert not list(verify(layout))


def test_a_version_that_does_not_count_goes_to_quarantine(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    def accept(manifest: WeightsManifest) -> bool:
        return manifest.version <= 4 or manifest.incarnation >= 2

    replacing = new_publisher(layout, 2, accept=accept)
    replacing.seed(4)
    manifest = replacing.publish(5, version_tensors(5).items(), {})
    assert (manifest.incarnation, published(layout, 5)) == (2, manifest)
    assert [path.is_dir() for path in layout.quarantine.glob("weights.000005.*")].count(True) == 1


def test_aliases_are_not_stored(layout: RunLayout, version_tensors: Make) -> None:
    publisher = new_publisher(layout)
    tied = {"head.weight": "embed.weight"}
    tensors = version_tensors(0)
    with_alias = {**tensors, "head.weight": tensors["embed.weight"]}
    manifest = publisher.publish(0, with_alias.items(), tied)
    assert manifest.tied == tied and "head.weight" not in {entry.name for entry in manifest.tensors}
    assert manifest.weights_digest == publisher.digest_only(tensors.items())
    assert manifest.weights_digest == publisher.digest_only(with_alias.items(), tied)


def test_wrong_calls_are_refused(layout: RunLayout, version_tensors: Make) -> None:
    publisher = new_publisher(layout)
    with pytest.raises(ValueError, match="no tensors"):
        publisher.publish(0, [], {})
    with pytest.raises(ValueError, match=r"not stored: embed$"):
        publisher.publish(0, version_tensors(0).items(), {"head": "embed"})
    with pytest.raises(ValueError, match="w comes twice"):
        publisher.publish(0, [("w", torch.zeros(1)), ("w", torch.zeros(1))], {})
    with pytest.raises(ValueError, match="at least 1"):
        new_publisher(layout, keyframe_every=0)
    assert committed_versions(layout) == []


def test_the_same_history_gives_the_same_payload(
    tmp_path_factory: pytest.TempPathFactory, version_tensors: Make
) -> None:
    runs = []
    for _ in range(2):
        layout = RunLayout(tmp_path_factory.mktemp("run"))
        publisher = new_publisher(layout)
        runs.append([publisher.publish(version, version_tensors(version).items(), {}).files for version in range(4)])
    assert all(first == second for first, second in pairwise(runs))


@pytest.mark.parametrize("how", ["deleted", "flipped"])
def test_a_replay_puts_lost_payload_back(layout: RunLayout, how: str) -> None:
    versions = [{"a": torch.arange(64.0) + step / 3, "b": torch.ones(8) * step} for step in range(4)]
    first = new_publisher(layout)
    digests = [first.publish(version, tensors.items(), {}).weights_digest for version, tensors in enumerate(versions)]
    victim = next(iter(layout.weights_version(2).glob("*.safetensors")))
    if how == "deleted":
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(data)
    again = new_publisher(layout, 2)
    for version, tensors in enumerate(versions):
        assert again.publish(version, tensors.items(), {}).weights_digest == digests[version]
    for version in range(4):
        assert Follower(layout).advance_to(version).weights_digest == digests[version]
    assert list(layout.quarantine.iterdir())


def damage(layout: RunLayout, version: int) -> None:
    """Flip a bit in every payload file of a version."""
    for ref in published(layout, version).files:
        path = layout.weights_version(version) / ref.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_the_snapshot_is_published_again_when_followers_cannot_reach_it(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    chain.publish(7, version_tensors(7).items(), {})
    before = published(layout, 7)
    damage(layout, 7)
    assert not chain.can_rebuild(7)
    again = chain.republish()
    assert again is not None and (again.artefact, again.parent) == ("keyframe", None)
    assert again.weights_digest == before.weights_digest
    assert Follower(layout).advance_to(7).weights_digest == before.weights_digest
    assert list(layout.quarantine.iterdir())
    chain.publish(8, version_tensors(8).items(), {})
    assert published(layout, 8).artefact == "delta", "the chain goes on from the mended version"
    assert chain.can_rebuild(8)


def test_a_publisher_without_a_snapshot_cannot_publish_it_again(layout: RunLayout) -> None:
    assert new_publisher(layout).republish() is None


def test_a_replay_publishes_distrusted_versions_again_as_keyframes(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    """Version 5 cannot be reached because of its parent's damage: a comparison of its own files would not mend that."""
    chain.publish(7, version_tensors(7).items(), {})
    wanted = [published(layout, version).weights_digest for version in range(8)]
    damage(layout, 3)
    damage(layout, 4)
    replay = new_publisher(layout, 2)
    replay.seed(2)
    replay.distrust([5])
    for version in (3, 4, 5, 6, 7):
        replay.publish(version, version_tensors(version).items(), {})
    manifests = [published(layout, version) for version in range(8)]
    assert [m.weights_digest for m in manifests] == wanted
    assert [m.incarnation for m in manifests] == [1, 1, 1, 2, 2, 2, 1, 1]
    assert (manifests[5].artefact, manifests[5].parent) == ("keyframe", None)
    assert not list(verify(layout))


def test_a_damaged_manifest_is_quarantined_and_published_again(
    layout: RunLayout, chain: Publisher, version_tensors: Make
) -> None:
    path = layout.weights_manifest(5)
    path.write_bytes(path.read_bytes()[:-20])
    replay = new_publisher(layout, 2)
    replay.seed(4)
    manifest = replay.publish(5, version_tensors(5).items(), {})
    assert manifest.incarnation == 2
    assert not list(verify(layout))
