"""Damage to each kind of artefact of a real run: found before it is used, named with file and digest, and gone around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from broken_runs import STOPPED_AT, STOPPED_SETTINGS, check_clear, check_sound, content, copied
from command import QUICK, check_equal, events, milesbatch

from milesbatch.audit.prove import audit_run
from milesbatch.errors import CorruptArtefactError
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import frozen_recipe, read_run_record
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trainer.batch import read_groups
from milesbatch.trainer.checkpointing import read_checkpoint
from milesbatch.weights.follower import Follower
from milesbatch.weights.reader import read_manifest

# -- what can be damaged, and how -----------------------------------------------------------------------------------


def start(layout: RunLayout) -> None:
    """What every start reads before it takes a run over."""
    record = read_run_record(layout)
    assert record is not None
    frozen_recipe(layout, record)
    read_incarnations(layout)


def take_stock(layout: RunLayout) -> None:
    """What a take-over reads to decide what counts; a file that does not count is named with its reason."""
    broken = survey(layout, read_incarnations(layout)).broken
    if broken:
        raise CorruptArtefactError("; ".join(f"{path}: {reason}" for path, reason in broken))


def follow(layout: RunLayout) -> None:
    """A worker reads the full copy of version 2; when it is damaged, the same weights come from version 1 and a delta."""
    manifest = read_manifest(layout, 2)
    assert manifest is not None
    reached = Follower(layout).advance_to(2)
    assert reached.weights_digest == manifest.weights_digest, "it would have been an error otherwise"


def restore(layout: RunLayout) -> None:
    read_checkpoint(layout, 4)


def replay(layout: RunLayout) -> None:
    record = survey(layout, read_incarnations(layout)).batches[STOPPED_AT - 1]
    read_groups(layout, record.trained)


@dataclass(frozen=True)
class Kind:
    """A kind of artefact: one file of it, below the run directory, and who uses it."""

    find: str
    use: Callable[[RunLayout], None]


KINDS = {
    "run.json": Kind("run.json", start),
    "recipe.yaml": Kind("recipe.yaml", start),
    "model configuration": Kind("model/config.json", start),
    "model tokenizer": Kind("model/tokenizer.json", start),
    "model weights": Kind("model/model.safetensors", start),
    "incarnation record": Kind("incarnations/000001.json", start),
    "batch record": Kind("batches/000003.json", take_stock),
    "newest batch record": Kind(f"batches/{STOPPED_AT:06d}.json", take_stock),
    "weights manifest": Kind("weights/000004/manifest.json", take_stock),
    "retirement": Kind("weights/000000/retired.json", take_stock),
    "keyframe": Kind("weights/000005/keyframe.*", take_stock),
    "delta": Kind("weights/000005/delta.*", take_stock),
    "older keyframe": Kind("weights/000002/keyframe.*", follow),
    "checkpoint manifest": Kind("checkpoints/000004/manifest.json", restore),
    "checkpoint metadata": Kind("checkpoints/000004/*/.metadata", restore),
    "checkpoint shard": Kind("checkpoints/000004/*/__1_0.distcp", restore),
    "waiting trajectories": Kind("trajectories/000048-*.arrow", take_stock),
    "trained trajectories": Kind("trajectories/000040-*.arrow", replay),
}
GONE_AROUND = ("older keyframe",)


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


def one(layout: RunLayout, pattern: str) -> Path:
    """The file of a pattern; where each rank has written one, that of the first."""
    return min(layout.root.glob(pattern))


# -- found, all of it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A copy whose files are damaged one at a time, and put back."""
    return RunLayout(copied(stopped, tmp_path_factory.mktemp("scratch") / "run"))


@pytest.fixture
def damaged(scratch: RunLayout, kind: str, damage: str) -> Iterator[Path]:
    path = one(scratch, KINDS[kind].find)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    yield path
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_before_it_is_used_and_named(scratch: RunLayout, damaged: Path, kind: str) -> None:
    if kind in GONE_AROUND:
        KINDS[kind].use(scratch)
    else:
        with pytest.raises(CorruptArtefactError) as caught:
            KINDS[kind].use(scratch)
        assert str(damaged) in caught.value.what
    name = str(damaged.relative_to(scratch.root))
    named = [finding for finding in audit_run(scratch).violations if finding.path == name]
    assert [finding.kind for finding in named][:1] == ["damaged"]
    assert "xxh128:" in named[0].detail


def test_undamaged_it_is_sound(scratch: RunLayout) -> None:
    assert audit_run(scratch).violations == ()
    for kind in KINDS.values():
        kind.use(scratch)


# -- and gone around, or refused ------------------------------------------------------------------------------------


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunLayout:
    return RunLayout(copied(stopped, tmp_path / "run"))


def break_file(layout: RunLayout, pattern: str, damage: str) -> Path:
    path = one(layout, pattern)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    return path


@pytest.mark.parametrize("kind", ["run.json", "recipe.yaml", "model weights", "incarnation record"])
def test_a_start_that_nothing_can_go_around_stops_and_touches_nothing(run: RunLayout, cache: Path, kind: str) -> None:
    path = break_file(run, KINDS[kind].find, "flipped in the middle")
    before = content(run.root)
    ended = milesbatch("run", QUICK, "--run-dir", run.root, *STOPPED_SETTINGS, cache=cache)
    check_clear(ended, 1, str(path), "xxh128:")
    assert content(run.root) == before


def check_quarantined(layout: RunLayout, *paths: Path) -> None:
    """Each is kept, with a reason that names the file and its digests."""
    reasons = [path.read_text() for path in layout.quarantine.glob("*.reason.txt")]
    for path in paths:
        assert [text for text in reasons if str(path) in text and "xxh128:" in text], f"{path}: {reasons}"


def test_payload_is_gone_around(run: RunLayout, unbroken: Path, cache: Path) -> None:
    """Weights by an older chain, the checkpoint before, and trajectories that are generated again: all at once."""
    broken = [
        break_file(run, "weights/000004/keyframe.*", "flipped at the end"),
        break_file(run, "weights/000005/delta.*", "flipped in the middle"),
        break_file(run, "checkpoints/000004/*/__0_0.distcp", "cut by a byte"),
        break_file(run, "trajectories/000048-*.arrow", "longer by a byte"),
        break_file(run, "trajectories/000040-*.arrow", "cut in half"),
    ]
    ended = milesbatch("run", QUICK, "--run-dir", run.root, *STOPPED_SETTINGS, cache=cache)
    assert ended.code == 0, ended.err
    check_quarantined(run, *broken)
    resume = events(run.root, "trainer-0", "resume")[-1]
    assert (resume["checkpoint"], resume["last_batch"], resume["last_version"]) == (3, STOPPED_AT, 3)
    assert events(run.root, "trainer-0", "regenerating")[0]["groups"] == [40, 41, 42, 43]
    check_equal(run.root, unbroken)
    check_sound(run.root, cache)


@pytest.mark.long
def test_records_are_gone_around(run: RunLayout, unbroken: Path, cache: Path) -> None:
    """The last step is recorded again; versions are published again by a replay from the checkpoint before."""
    broken = [
        break_file(run, f"batches/{STOPPED_AT:06d}.json", "cut by a byte"),
        break_file(run, "weights/000004/manifest.json", "longer by a byte"),
        break_file(run, "weights/000000/retired.json", "cut in half"),
        break_file(run, "checkpoints/000004/manifest.json", "flipped at the start"),
    ]
    ended = milesbatch("run", QUICK, "--run-dir", run.root, *STOPPED_SETTINGS, cache=cache)
    assert ended.code == 0, ended.err
    check_quarantined(run, *broken)
    resume = events(run.root, "trainer-0", "resume")[-1]
    assert (resume["checkpoint"], resume["last_batch"], resume["last_version"]) == (3, STOPPED_AT - 1, 3)
    check_equal(run.root, unbroken)
    check_sound(run.root, cache)
