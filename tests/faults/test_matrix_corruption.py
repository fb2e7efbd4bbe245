"""Damage to each kind of artefact of a real run: found before it is used, named with file and digest, and gone around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from broken_runs import STOPPED_AT, check_clear, check_sound, content, copied
from command import QUICK, check_equal, events, milesbatch

from milesbatch.audit.prove import audit_run
from milesbatch.errors import CorruptArtefactError
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import frozen_recipe, read_run_record
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trainer.batch import read_groups
from milesbatch.trainer.checkpointing import read_checkpoint
from milesbatch.weights.follower import Follower

SETTINGS = ("--set", "checkpoint.every=2")


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunLayout:
    return RunLayout(copied(stopped, tmp_path / "run"))


# -- what can be damaged, and how -----------------------------------------------------------------------------------


def start(layout: RunLayout) -> None:
    """What every start reads before it takes a run over."""
    record = read_run_record(layout)
    assert record is not None
    frozen_recipe(layout, record)
    read_incarnations(layout)


def take_stock(layout: RunLayout) -> None:
    """What a take-over reads to decide what counts; a file that does not is named with its reason."""
    broken = survey(layout, read_incarnations(layout)).broken
    if broken:
        raise CorruptArtefactError("; ".join(f"{path}: {reason}" for path, reason in broken))


def follow(version: int) -> Callable[[RunLayout], None]:
    def use(layout: RunLayout) -> None:
        """Damage may be gone around, but not be used: what comes out is proven by every digest."""
        Follower(layout).advance_to(version)
        raise CorruptArtefactError("gone around")

    return use


def restore(layout: RunLayout) -> None:
    read_checkpoint(layout, 4)


def replay(layout: RunLayout) -> None:
    record = survey(layout, read_incarnations(layout)).batches[STOPPED_AT - 1]
    read_groups(layout, record.trained)


@dataclass(frozen=True)
class Kind:
    """A kind of artefact: one of its files, and who uses it."""

    find: str
    """Pattern below the run directory; of several files the last one."""
    use: Callable[[RunLayout], None]

    def file(self, layout: RunLayout) -> Path:
        return sorted(layout.root.glob(self.find))[-1]


KINDS = {
    "run.json": Kind("run.json", start),
    "recipe.yaml": Kind("recipe.yaml", start),
    "model configuration": Kind("model/config.json", start),
    "model tokenizer": Kind("model/tokenizer.json", start),
    "model weights": Kind("model/model.safetensors", start),
    "incarnation record": Kind("incarnations/*.json", start),
    "batch record": Kind("batches/000003.json", take_stock),
    "newest batch record": Kind("batches/*.json", take_stock),
    "weights manifest": Kind("weights/000005/manifest.json", take_stock),
    "keyframe": Kind("weights/000004/keyframe.*", take_stock),
    "delta": Kind("weights/000005/delta.*", take_stock),
    "older weights manifest": Kind("weights/000002/manifest.json", follow(3)),
    "older delta": Kind("weights/000002/delta.*", follow(3)),
    "checkpoint manifest": Kind("checkpoints/000004/manifest.json", restore),
    "checkpoint metadata": Kind("checkpoints/000004/*/.metadata", restore),
    "checkpoint shard": Kind("checkpoints/000004/*/*.distcp", restore),
    "waiting trajectories": Kind("trajectories/000048-*.arrow", take_stock),
    "trained trajectories": Kind("trajectories/000040-*.arrow", replay),
}


def flipped(data: bytes, place: int) -> bytes:
    damaged = bytearray(data)
    damaged[place] ^= 0x01
    return bytes(damaged)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped at the start": lambda data: flipped(data, 0),
    "flipped in the middle": lambda data: flipped(data, len(data) // 2),
    "flipped at the end": lambda data: flipped(data, -1),
    "cut to nothing": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "longer by a byte": lambda data: data + b"\n",
    "longer by a page": lambda data: data + bytes(4096),
}


# -- found, all of it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A copy whose files are damaged one at a time, and put back."""
    return RunLayout(copied(stopped, tmp_path_factory.mktemp("scratch") / "run"))


@pytest.fixture
def damaged(scratch: RunLayout, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = KINDS[request.node.callspec.params["kind"]].file(scratch)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[request.node.callspec.params["damage"]](whole))
    yield path
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_before_it_is_used_and_named(scratch: RunLayout, damaged: Path, kind: str, damage: str) -> None:
    with pytest.raises(CorruptArtefactError) as caught:
        KINDS[kind].use(scratch)
    if caught.value.what != "gone around":
        assert str(damaged) in caught.value.what
    name = str(damaged.relative_to(scratch.root))
    named = [finding for finding in audit_run(scratch).violations if finding.path == name]
    assert [finding.kind for finding in named][:1] == ["damaged"], (kind, damage)
    assert "xxh128:" in named[0].detail


def test_undamaged_it_is_sound(scratch: RunLayout) -> None:
    assert audit_run(scratch).violations == ()
    for use in {kind.use for kind in KINDS.values() if not kind.find.startswith("weights/000002")}:
        use(scratch)


# -- and gone around, or refused ------------------------------------------------------------------------------------


def damage(layout: RunLayout, kind: str, how: str) -> Path:
    path = KINDS[kind].file(layout)
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    return path


@pytest.mark.parametrize("kind", ["run.json", "recipe.yaml", "model weights", "incarnation record"])
def test_a_start_that_nothing_can_go_around_stops_and_touches_nothing(run: RunLayout, cache: Path, kind: str) -> None:
    path = damage(run, kind, "flipped in the middle")
    before = content(run.root)
    check_clear(milesbatch("run", QUICK, "--run-dir", run.root, *SETTINGS, cache=cache), 1, str(path), "xxh128:")
    assert content(run.root) == before


def check_quarantined(layout: RunLayout, *paths: Path) -> None:
    """Each is kept, with a reason that names the file and its digests."""
    for path in paths:
        reasons = [
            place.read_text()
            for place in layout.quarantine.glob("*.reason.txt")
            if str(path) in place.read_text() and "xxh128:" in place.read_text()
        ]
        assert reasons, f"{path}: {[place.read_text() for place in layout.quarantine.glob('*.reason.txt')]}"


def test_payload_is_gone_around(run: RunLayout, unbroken: Path, cache: Path) -> None:
    """Weights by an older chain, the checkpoint before, and trajectories that are generated again: all at once."""
    broken = [
        damage(run, "delta", "flipped in the middle"),
        damage(run, "checkpoint shard", "cut by a byte"),
        damage(run, "waiting trajectories", "longer by a byte"),
        damage(run, "trained trajectories", "cut in half"),
    ]
    ended = milesbatch("run", QUICK, "--run-dir", run.root, *SETTINGS, cache=cache)
    assert ended.code == 0, ended.err
    check_quarantined(run, *broken)
    assert [event["checkpoint"] for event in events(run.root, "trainer-0", "resume")][-1] == 2
    assert events(run.root, "trainer-0", "regenerating")[0]["groups"] == [40, 41, 42, 43]
    check_equal(run.root, unbroken)
    check_sound(run.root, cache)


def test_records_are_gone_around(run: RunLayout, unbroken: Path, cache: Path) -> None:
    """The last step is recorded again; versions are published again by a replay from the checkpoint before."""
    broken = [
        damage(run, "newest batch record", "cut by a byte"),
        damage(run, "weights manifest", "longer by a byte"),
        damage(run, "keyframe", "flipped at the end"),
        damage(run, "checkpoint manifest", "flipped at the start"),
    ]
    ended = milesbatch("run", QUICK, "--run-dir", run.root, *SETTINGS, cache=cache)
    assert ended.code == 0, ended.err
    check_quarantined(run, *broken)
    resume = events(run.root, "trainer-0", "resume")[-1]
    assert (resume["checkpoint"], resume["last_batch"], resume["last_version"]) == (2, 5, 3)
    check_equal(run.root, unbroken)
    check_sound(run.root, cache)
