"""The trainer's and the workers' side together, over real groups and files; the controller's roster without HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_layout, make_recipe, unfenced

from milesbatch.broadcast.header import header_of, new_stream
from milesbatch.cluster.context import RoleContext
from milesbatch.controller.hub import Hub
from milesbatch.errors import CorruptArtefactError, RunFailedError, StoppedToContinue
from milesbatch.faults.points import set_hook
from milesbatch.rollout.reaching import WeightsReach
from milesbatch.rollout.receiving import Receiver, prove
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout
from milesbatch.trainer.broadcasting import Broadcasting
from milesbatch.weights.follower import Follower
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.rebuild import Copy
from milesbatch.weights.tensors import RawTensor
from milesbatch.wire import messages as wire

SECONDS = 20.0


class Pulse:
    """A pulse without a heart."""

    published, should_stop, state, policy_version = -1, False, "", -1

    def moved(self, amount: int = 1) -> None: ...


class Side:
    """A process's controller: the hub itself, asked by one thread at a time."""

    def __init__(self, hub: Hub, lock: threading.Lock, process: str) -> None:
        self.hub, self.lock, self.process = hub, lock, process
        self.is_over = False

    def next_broadcast(self, after: int) -> wire.BroadcastCall:
        if self.is_over:
            raise StoppedToContinue("the test is over")
        with self.lock:
            call = asyncio.run(
                self.hub.broadcasts.poll(wire.BroadcastPoll(process=self.process, after=after, wait_s=0))
            )
        if call.round < 0:
            time.sleep(0.02)
        return call

    def is_coming(self, version: int) -> wire.BroadcastAnswer:
        with self.lock:
            return self.hub.broadcasts.question(wire.BroadcastQuestion(process=self.process, version=version))

    def ask(self, path: str, message: Any, answer: Any) -> Any:
        with self.lock:
            if path == "broadcast-members":
                return self.hub.broadcast_members(message)
            assert path == "broadcast-begin"
            return self.hub.broadcasts.begin(message)

    def tell(self, path: str, message: Any) -> None:
        assert path == "broadcast-end"
        with self.lock:
            self.hub.broadcasts.end(message)


class Scene:
    """A trainer and workers on one run directory."""

    def __init__(self, root: Path, workers: int = 2, **weights: Any) -> None:
        self.layout = make_layout(root / "run")
        self.recipe = make_recipe(
            steps=100,
            determinism="relaxed",
            weights={
                "transport": "broadcast",
                "broadcast_bucket_bytes": 4096,
                "broadcast_timeout_s": SECONDS,
                **weights,
            },
        )
        self.hub, self.lock = Hub(self.recipe), threading.Lock()
        self.publisher = Publisher(self.layout, 1, keyframe_every=4, before_commit=unfenced)
        self.events = EventLog(self.layout, "trainer-0", 1)
        context = RoleContext(root, "trainer", 0, 1, 1, 1, "", "", 0, 1.0)
        self.trainer = Broadcasting(
            context, self.recipe, Side(self.hub, self.lock, "trainer-0.1"), Pulse(), self.events
        )
        self.sides: list[Side] = []
        self.receivers: dict[str, Receiver] = {}
        self.reaches: dict[str, WeightsReach] = {}
        for number in range(workers):
            self.add(f"rollout-{number}")

    def add(self, name: str, attempt: int = 1) -> None:
        side = Side(self.hub, self.lock, f"{name}.{attempt}")
        follower, pulse, events = Follower(self.layout), Pulse(), EventLog(self.layout, name, 1)
        receiver = Receiver(self.layout, follower.published_manifest, side, pulse, events, 2)
        self.reaches[name] = WeightsReach(follower, side, pulse, events, is_bitwise=True, receiver=receiver)
        self.receivers[name] = receiver
        self.sides.append(side)
        receiver.start()
        self.await_ready(side.process)

    def await_ready(self, *processes: str) -> None:
        deadline_s = time.monotonic() + SECONDS
        while not set(processes) <= set(self.hub.broadcasts.members().processes):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def publish(self, version: int) -> None:
        """As the trainer does: files, then the broadcast, then telling."""
        manifest = self.publisher.publish(version, make_tensors(version).items(), {})
        self.trainer.begin(manifest, self.publisher.snapshot_tensors)
        with self.lock:
            self.hub.publish(wire.Published(version=version))

    def reach(self, name: str, version: int) -> str:
        """How ``version`` came to that worker; proves that it is the right one."""
        weights = self.reaches[name].reach(version)
        assert weights.version == version
        expected = make_tensors(version)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights.tensors().items())
        return self.reaches[name].source

    def told(self, process: str, event: str) -> list[dict[str, Any]]:
        lines = self.layout.event_log(process, 1).read_text().splitlines()
        return [body for body in map(json.loads, lines) if body["event"] == event]

    def end(self) -> None:
        for side in self.sides:
            side.is_over = True
        self.trainer.close()


def make_tensors(version: int) -> dict[str, torch.Tensor]:
    """Fresh ones: the published version does not depend on them."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "embed": torch.randn(100, 64, generator=generator).bfloat16(),
        "layer": torch.randn(64, 64, generator=generator),
        "norm": torch.ones(64),
    }
    for step in range(version):
        tensors["layer"][step % 64] += 1.0
        tensors["embed"][step % 100] += 1.0
    return tensors


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**arguments: Any) -> Scene:
        made.append(Scene(tmp_path, **arguments))
        return made[-1]

    yield make
    set_hook(None)
    for one in made:
        one.end()


def slow(name: str, thread: str, seconds: float, nth: int = 1) -> Callable[[str], None]:
    passed = 0

    def hook(point: str) -> None:
        nonlocal passed
        if point == name and thread in threading.current_thread().name:
            passed += 1
            if passed == nth:
                time.sleep(seconds)

    return hook


def test_versions_come_by_broadcast_over_one_group_and_figures_are_told(scene: Callable[..., Scene]) -> None:
    one = scene()
    for version in range(3):
        one.publish(version)
        assert [one.reach(name, version) for name in ("rollout-0", "rollout-1")] == ["broadcast", "broadcast"]
        figures = one.trainer.finish()
        assert one.reaches["rollout-0"].is_near(version + 1), "nothing is on its way now"
        assert (figures["broadcast_receivers"], figures["broadcast_groups"]) == (2, 1)
        assert figures["broadcast_bytes"] == 100 * 64 * 2 + 64 * 64 * 4 + 64 * 4
    assert [event["members"] for event in one.told("trainer-0", "broadcast_group")] == [["rollout-0.1", "rollout-1.1"]]
    assert [event["version"] for event in one.told("trainer-0", "weights_broadcast")] == [0, 1, 2]


def test_one_that_comes_later_catches_up_by_files_and_joins_the_next_group(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    one.publish(0)
    one.add("rollout-1")
    assert [one.reach(name, 0) for name in ("rollout-0", "rollout-1")] == ["broadcast", "files"]
    one.trainer.finish()
    one.publish(1)
    assert [one.reach(name, 1) for name in ("rollout-0", "rollout-1")] == ["broadcast", "broadcast"]
    one.trainer.finish()
    assert [event["generation"] for event in one.told("trainer-0", "broadcast_group")] == [1, 2]


def test_a_version_that_was_skipped_is_left_and_a_delta_follows_a_broadcast(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    for version in range(3):
        one.publish(version)
        one.trainer.finish()
    assert one.reach("rollout-0", 2) == "broadcast"
    one.sides[0].is_over = True
    one.hub.forget("rollout-0")
    one.publish(3)
    assert one.trainer.finish() == {}
    assert one.reach("rollout-0", 3) == "files", "a delta on what was broadcast"
    assert one.reach("rollout-0", 0) == "files", "back"


def test_a_slow_worker_costs_its_time_once_and_comes_back_by_files(scene: Callable[..., Scene]) -> None:
    one = scene(broadcast_timeout_s=3.0)
    one.publish(0)
    one.trainer.finish()
    # Receiving threads are named after the version: the first of the two that passes is the slow one.
    set_hook(slow("broadcast.receiving", "policy version 1", 9.0))
    began_s = time.monotonic()
    one.publish(1)
    assert time.monotonic() - began_s < 1.0, "training goes on meanwhile"
    figures = one.trainer.finish()
    assert figures["broadcast_receivers"] == 0
    assert time.monotonic() - began_s < 6.5
    assert sorted(one.reach(name, 1) for name in ("rollout-0", "rollout-1")) == ["files", "files"]
    (failure,) = one.told("trainer-0", "broadcast_failed")
    (late,) = failure["missing"]
    other = next(name for name in ("rollout-0.1", "rollout-1.1") if name != late)
    one.await_ready(other)
    one.publish(2)
    assert one.trainer.finish()["broadcast_receivers"] == 1
    assert [event["members"] for event in one.told("trainer-0", "broadcast_group")][-1] == [other]
    one.await_ready("rollout-0.1", "rollout-1.1")
    one.publish(3)
    assert one.trainer.finish()["broadcast_receivers"] == 2, "after a version without it, it may come again"


def test_other_bytes_than_the_published_ones_are_refused(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    one.publish(0)
    assert one.reach("rollout-0", 0) == "broadcast"
    one.trainer.finish()
    manifest = one.publisher.publish(1, make_tensors(1).items(), {})
    wrong = {name: RawTensor(t.dtype, t.shape, t.data.copy()) for name, t in one.publisher.snapshot_tensors.items()}
    wrong["layer"].data[777] ^= 1
    one.trainer.begin(manifest, wrong)
    assert one.reach("rollout-0", 1) == "files"
    assert one.trainer.finish()["broadcast_receivers"] == 0
    (event,) = one.told("trainer-0", "weights_broadcast")[1:]
    assert "tensor layer" in event["refused"]["rollout-0.1"]
    assert "tensor layer" in one.told("rollout-0", "broadcast_lost")[0]["error"]


def test_with_both_every_bit_is_compared_with_the_files(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    reach = one.reaches["rollout-0"]
    reach._compares = True
    one.publish(0)
    assert one.reach("rollout-0", 0) == "broadcast"
    one.trainer.finish()
    one.publish(1)
    one.trainer.finish()
    kept = one.receivers["rollout-0"]._kept[1]
    other = {**kept.tensors, "norm": RawTensor("F32", (64,), np.zeros(256, np.uint8))}
    one.receivers["rollout-0"]._kept[1] = Copy(kept.manifest, other)  # as if a digest had not seen it
    with pytest.raises(RunFailedError, match="tensor norm came otherwise by broadcast"):
        reach.reach(1)


def test_what_nobody_will_use_is_not_sent(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    one.publish(0)
    one.trainer.finish()
    one.publish(0)  # as in a replay
    assert one.trainer.finish() == {}
    manifest = one.publisher.publish(1, make_tensors(1).items(), {})
    one.trainer._last_useful = 0
    one.trainer.begin(manifest, one.publisher.snapshot_tensors)
    assert one.trainer.finish() == {}


def test_of_many_that_are_not_wanted_only_the_newest_are_kept(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    for version in range(5):
        one.publish(version)
        one.trainer.finish()
    assert sorted(one.receivers["rollout-0"]._kept) == [3, 4]
    assert one.reach("rollout-0", 2) == "files"
    assert one.reach("rollout-0", 4) == "broadcast"
    assert one.receivers["rollout-0"]._kept == {}


def test_a_worker_that_is_told_to_stop_does_not_wait_for_what_is_on_its_way(scene: Callable[..., Scene]) -> None:
    one = scene(workers=1)
    set_hook(slow("broadcast.sending", "the broadcast", 10.0))
    one.publish(0)
    assert one.receivers["rollout-0"].is_coming(0)
    assert not one.reaches["rollout-0"].is_near(0)
    threading.Timer(0.3, lambda: setattr(one.receivers["rollout-0"]._pulse, "should_stop", True)).start()
    began_s = time.monotonic()
    assert one.reach("rollout-0", 0) == "files"
    assert time.monotonic() - began_s < 3.0


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_any_flipped_byte_is_refused_before_use(layout_with_version: tuple[RunLayout, Publisher], place: int) -> None:
    layout, publisher = layout_with_version
    manifest = Follower(layout).published_manifest(0)
    header = header_of(manifest, 1000)
    stream = new_stream(header)
    for slot in header.slots:
        stream[slot.begin : slot.end] = publisher.snapshot_tensors[slot.name].data
    assert prove(layout, manifest, header, stream).version == 0
    stream[place] ^= 0x80
    with pytest.raises(CorruptArtefactError, match="not broadcast as it was published"):
        prove(layout, manifest, header, stream)


def test_another_version_under_the_same_number_is_refused(layout_with_version: tuple[RunLayout, Publisher]) -> None:
    layout, _ = layout_with_version
    manifest = Follower(layout).published_manifest(0)
    other = manifest.model_copy(update={"weights_digest": "xxh128:" + "0" * 32})
    with pytest.raises(CorruptArtefactError, match="broadcast with weights digest"):
        prove(layout, other, header_of(manifest, 1000), new_stream(header_of(manifest, 1000)))


@pytest.fixture
def layout_with_version(tmp_path: Path) -> tuple[RunLayout, Publisher]:
    layout = make_layout(tmp_path / "run")
    publisher = Publisher(layout, 1, keyframe_every=4, before_commit=unfenced)
    publisher.publish(0, make_tensors(0).items(), {})
    return layout, publisher


def test_a_trainer_that_cannot_open_a_store_goes_on_with_files(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milesbatch.broadcast.group._OPEN_S", 0.2)
    one = scene(workers=1)
    one.trainer._address = "no.such.host.invalid"
    began_s = time.monotonic()
    for version in range(3):
        one.publish(version)
        assert one.trainer.finish() == {}
        assert one.reach("rollout-0", version) == "files"
    assert time.monotonic() - began_s < 8.0
    told = one.told("trainer-0", "broadcast_failed")
    assert [event["version"] for event in told] == [0, 2], "not at every version"
    assert "cannot be opened at no.such.host.invalid" in told[0]["error"]
