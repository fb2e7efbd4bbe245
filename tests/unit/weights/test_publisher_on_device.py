"""Shares that stay on the device: the same files as by the host, byte for byte, while only changes cross; and never a base that
was not committed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from milesbatch.errors import StorageError
from milesbatch.records import WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights import device_diff
from milesbatch.weights import tensors as crossings
from milesbatch.weights.device_diff import crossed_bytes
from milesbatch.weights.draft import left_there, owned
from milesbatch.weights.follower import Follower
from milesbatch.weights.listing import verify
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.tensors import DeviceTensor, own_stream

Tensors = dict[str, torch.Tensor]
Make = Callable[[int], Tensors]
VERSIONS = 7


def make(layout: RunLayout, incarnation: int = 1, **options: Any) -> Publisher:
    return Publisher(layout, incarnation, **{"keyframe_every": 3, "before_commit": lambda: None, **options})


def here(tensors: Tensors) -> dict[str, DeviceTensor]:
    return left_there(((name, tensor.clone()) for name, tensor in tensors.items()), {})


def publish(publisher: Publisher, version: int, tensors: Tensors) -> WeightsManifest:
    return publisher.publish_share(version, here(tensors), {})


def size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def check_follows(layout: RunLayout, versions: int) -> None:
    """A follower from version to version has the very bits, and nothing on disk is other than recorded."""
    follower = Follower(layout)
    for version in range(versions):
        follower.advance_to(version)
    assert list(verify(layout)) == []


@pytest.fixture
def large() -> Make:
    """Version -> bfloat16 tensors of 6 MiB, enough for threads; 1 % of the large ones' elements change each time."""

    def tensors(version: int) -> Tensors:
        made = torch.Generator().manual_seed(11)
        found = {f"w{i}": (torch.randn(1 << 20, generator=made) * 0.02).bfloat16() for i in range(3)}
        found["norm"] = torch.ones(1024).bfloat16()
        for step in range(1, version + 1):
            for name in ("w0", "w1", "w2"):
                found[name].view(torch.int16)[step::100] += 1
        return found

    return tensors


def test_the_files_are_those_of_the_host_way(tmp_path: Path, layout: RunLayout, version_tensors: Make) -> None:
    """Tensors of all kinds: too dense, tiny, empty, of other types; some of them cross whole."""
    other = RunLayout(tmp_path / "host")
    on_device, on_host = make(layout), make(other)
    for version in range(VERSIONS):
        tensors = version_tensors(version)
        tensors["dense"] = torch.full((70,), float(version))
        tensors["wide"] = torch.arange(9, dtype=torch.float64) + version // 3
        found, expected = publish(on_device, version, tensors), on_host.publish(version, tensors.items(), {})
        assert found.files == expected.files and found.tensors == expected.tensors
        assert found.weights_digest == expected.weights_digest
    check_follows(layout, VERSIONS)


def test_only_changes_cross(layout: RunLayout, large: Make, tmp_path: Path) -> None:
    publisher, on_host = make(layout, keyframe_every=2), make(RunLayout(tmp_path / "host"), keyframe_every=2)
    everything = size(large(0))
    for version in range(4):
        found = publish(publisher, version, large(version))
        expected = on_host.publish_share(version, owned(large(version).items(), {}), {})
        assert found.files == expected.files
        assert on_host.crossed_bytes == everything
        if version == 0:
            assert publisher.crossed_bytes == everything
        else:
            changed = sum(entry.changed for entry in found.tensors)
            assert changed > 30_000 and found.parent == version - 1
            tiny = large(version)["norm"].nbytes  # less than the counts that would come
            assert publisher.crossed_bytes == crossed_bytes(changed) + 2 * crossed_bytes(0) + tiny < everything / 20
    check_follows(layout, 4)


def test_between_versions_the_device_holds_one_copy_and_the_host_shares_what_stayed(
    layout: RunLayout, large: Make
) -> None:
    publisher = make(layout)
    publish(publisher, 0, large(0))
    norm = publisher.snapshot_tensors["norm"].data
    share = here(large(1))
    tensors = [weakref.ref(tensor.tensor) for tensor in share.values()]
    publisher.publish_share(1, share, {})
    del share
    gc.collect()
    assert all(tensor() is not None for tensor in tensors), "the base of the next delta"
    assert publisher.snapshot_tensors["norm"].data is norm
    publish(publisher, 2, large(2))
    gc.collect()
    assert all(tensor() is None for tensor in tensors)


@pytest.mark.parametrize("fails", ["payload", "manifest"])
def test_a_version_whose_commit_failed_is_not_built_upon(
    layout: RunLayout, large: Make, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The other weights of the failed attempt are in neither copy: the next attempt's delta is on what is committed."""
    broken = False

    def before_commit() -> None:
        if broken:
            raise StorageError("no", mend="none")

    publisher = make(layout, keyframe_every=100, before_commit=before_commit)
    for version in range(2):
        publish(publisher, version, large(version))
    lost = large(2)
    lost["w0"].view(torch.int16)[7::100] += 3
    lost["norm"].view(torch.int16)[5] += 1
    broken = True
    if fails == "payload":
        monkeypatch.setattr(Publisher, "_write", lambda *_: before_commit())
    with pytest.raises(StorageError):
        publish(publisher, 2, lost)
    broken = False
    monkeypatch.undo()
    assert publisher.snapshot_version == 1
    found = publish(publisher, 2, large(2))
    assert found.parent == 1 and publisher.drifts == ()
    assert {entry.name: entry.changed for entry in found.tensors} == {"w0": 10486, "w1": 10486, "w2": 10486, "norm": 0}
    publish(publisher, 3, large(3))
    check_follows(layout, 4)


def test_after_a_restart_the_resumed_weights_are_the_base_on_the_device_too(layout: RunLayout, large: Make) -> None:
    first = make(layout, keyframe_every=100)
    for version in range(2):
        publish(first, version, large(version))
    again = make(layout, 2, keyframe_every=100)
    assert again.resume(1, here(large(1)))
    found = publish(again, 2, large(2))
    assert found.parent == 1 and again.crossed_bytes < size(large(0)) / 20
    other = make(layout, 3, keyframe_every=100)
    assert not other.resume(2, here(large(1))), "other weights than the published ones"
    found = publish(other, 3, large(3))
    assert (found.parent, other.crossed_bytes) == (None, size(large(0)))
    check_follows(layout, 4)


def test_a_base_from_files_is_on_the_device_from_the_next_version_on(layout: RunLayout, large: Make) -> None:
    """As after a divergence: what is published is not what the device has."""
    publisher = make(layout, keyframe_every=100)
    publish(publisher, 0, large(0))
    publisher.forget()
    publisher.seed(0)
    crossed = []
    for version in (1, 2):
        assert publish(publisher, version, large(version)).parent == version - 1
        crossed.append(publisher.crossed_bytes)
    assert crossed[0] == size(large(0)) and crossed[1] < crossed[0] / 20
    check_follows(layout, 3)


def test_a_replayed_version_is_compared_and_is_the_base_then(layout: RunLayout, large: Make) -> None:
    publisher = make(layout, keyframe_every=100)
    for version in range(3):
        publish(publisher, version, large(version))
    again = make(layout, 2, keyframe_every=100)
    assert again.resume(0, here(large(0)))
    for version in (1, 2):
        assert publish(again, version, large(version)).incarnation == 1
    assert publish(again, 3, large(3)).parent == 2
    assert again.crossed_bytes < size(large(0)) / 20
    check_follows(layout, 4)


@pytest.mark.parametrize("where", ["host", "device"])
def test_copies_that_drifted_apart_cost_a_full_copy_and_are_named(
    tmp_path: Path, layout: RunLayout, large: Make, where: str
) -> None:
    """A bit of memory flips between two versions. Followers get what the device has now, whichever copy was the wrong one."""
    publisher = make(layout, keyframe_every=100)
    publish(publisher, 0, large(0))
    if where == "host":
        publisher.snapshot_tensors["w1"].data[12_345] ^= 4
    else:
        snapshot = publisher._snapshot
        assert snapshot is not None
        snapshot.there["w1"].tensor.view(torch.int16)[12_345] ^= 4
    found = publish(publisher, 1, large(1))
    assert found.parent is None and found.artefact == "keyframe"
    assert len(publisher.drifts) == 1 and "tensor w1: the host's copy" in publisher.drifts[0]
    assert publish(publisher, 2, large(2)).parent == 1 and publisher.drifts == ()
    check_follows(layout, 3)
    expected = make(RunLayout(tmp_path / "other")).publish(0, large(2).items(), {})
    assert expected.weights_digest == publish(publisher, 2, large(2)).weights_digest


def test_another_set_of_tensors_crosses_whole(layout: RunLayout, large: Make) -> None:
    publisher = make(layout, keyframe_every=100)
    publish(publisher, 0, large(0))
    tensors = large(1)
    tensors["w2"] = tensors["w2"].reshape(1 << 10, 1 << 10)
    tensors["new"] = torch.zeros(8)
    assert publish(publisher, 1, tensors).parent is None
    tensors["w0"] = tensors["w0"].float()
    assert publish(publisher, 2, tensors).parent is None
    check_follows(layout, 3)


def test_a_fetched_tensor_has_memory_of_its_own_and_aliases_are_passed_over() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    share = left_there({"a": tensor.T, "b": tensor}.items(), {"b": "a"})
    assert set(share) == {"a"} and share["a"].shape == (3, 2) and share["a"].num_bytes == 24
    raw = share["a"].fetch()
    share["a"].tensor.zero_()
    assert np.array_equal(raw.data.view(np.float32), [0, 3, 1, 4, 2, 5])
    with pytest.raises(ValueError, match="comes twice"):
        left_there([("a", tensor), ("a", tensor)], {})
    with pytest.raises(ValueError, match="complex64"):
        left_there([("a", tensor.to(torch.complex64))], {})


def test_on_cuda_all_that_crosses_has_one_stream_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be seen without a GPU: which stream is entered, and when it is left."""
    entered: list[object] = []

    @contextmanager
    def stream(own: object) -> Iterator[None]:
        entered.append(own)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    gpu = torch.device("cuda", 0)
    for look in (own_stream, own_stream, device_diff._turn):
        with look(gpu):
            assert entered[-1] == "stream of cuda:0"
        with look(torch.device("cpu")):
            assert entered[-1] is None
    assert len(entered) == 6
    crossings._stream_of.cache_clear()
