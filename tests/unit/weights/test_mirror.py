"""Pushing and pulling weights, with a directory as the store: what is fetched, damage, kills, refusals, commands."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from mirror_runs import assert_holds, make_tensors, make_weights_run, publish
from safetensors.torch import load_file
from typer.testing import CliRunner

from milesbatch.cli import following, weights_mirror
from milesbatch.cli.weights import app
from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.records import FileRef, Hold, Retirement, RunRecord
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed
from milesbatch.store.port import KeyRefusedError
from milesbatch.store.posix_store import PosixStore
from milesbatch.weights import mirror_pull
from milesbatch.weights.follower import Follower
from milesbatch.weights.listing import verify
from milesbatch.weights.mirror_pull import Pull, Pulled
from milesbatch.weights.mirror_push import Push, Pushed
from milesbatch.weights.staging import Staging


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    return make_weights_run(tmp_path / "run")


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


@pytest.fixture
def pushed(run: RunLayout, store: PosixStore) -> PosixStore:
    push_all(run, store)
    return store


def push_all(run: RunLayout, store: PosixStore) -> list[Pushed]:
    push = Push(run, store)
    push.begin()
    return list(push.versions())


def pull_one(store: PosixStore, directory: Path, version: int) -> Pulled:
    pull = Pull(store, directory)
    with pull.taken():
        return pull.bring(version)


def payload(store: PosixStore, version: int, kind: str) -> Path:
    (path,) = RunLayout(store.root).weights_version(version).glob(f"{kind}.*")
    return path


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def names(directory: Path) -> list[str]:
    """Payload that was fetched, such as ``4 keyframe``."""
    files = RunLayout(directory).weights.glob("*/*.safetensors")
    return sorted(f"{int(path.parent.name)} {path.name.split('.')[0]}" for path in files)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# -- what is pushed and fetched ------------------------------------------------------------------------------------------


def test_a_pull_fetches_the_cheapest_way_and_then_only_what_is_new(
    run: RunLayout, pushed: PosixStore, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    first = pull_one(pushed, here, 6)
    assert names(here) == ["4 keyframe", "5 delta", "6 delta"]
    sizes = [path.stat().st_size for path in RunLayout(here).weights.glob("*/*.safetensors")]
    assert (first.files, first.bytes, first.damage) == (3, sum(sizes), ())
    assert_holds(here, 6)
    again = pull_one(pushed, here, 6)
    assert (again.files, again.bytes) == (0, 0)
    publish(run, range(9))
    assert [one.version for one in push_all(run, pushed) if not one.was_there] == [7, 8]
    assert pull_one(pushed, here, 8).files == 2, "two deltas are less than the keyframe of 8"
    assert "8 keyframe" not in names(here)
    assert_holds(here, 8)
    assert list(verify(RunLayout(here))) == []


def test_what_is_pushed_and_pulled_is_the_run_bit_for_bit_but_for_its_starting_weights(
    run: RunLayout, pushed: PosixStore, tmp_path: Path
) -> None:
    for relative in ("run.json", "model/config.json", "model/tokenizer/vocab.json", "weights/000004/manifest.json"):
        assert (pushed.root / relative).read_bytes() == (run.root / relative).read_bytes()
    assert not (pushed.root / "model/model.safetensors").exists() and not (pushed.root / "recipe.yaml").exists()
    here = tmp_path / "here"
    pull_one(pushed, here, 4)
    for relative in ("run.json", "model/config.json", "model/tokenizer/vocab.json", "weights/000004/manifest.json"):
        assert (here / relative).read_bytes() == (run.root / relative).read_bytes()


def test_a_second_push_reads_manifests_and_writes_nothing(run: RunLayout, pushed: PosixStore) -> None:
    before = {path: path.stat().st_mtime_ns for path in pushed.root.rglob("*")}
    assert all(one.was_there and one.bytes == 0 for one in push_all(run, pushed))
    assert {path: path.stat().st_mtime_ns for path in pushed.root.rglob("*")} == before


def test_retired_and_sealed_off_versions_are_not_pushed(
    run: RunLayout, store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Retirement(version=0, incarnation=1, base=4, needed=4, checkpoint=6, staleness=1, created_at="")
    run.weights_retirement(0).write_bytes(record.to_bytes())
    monkeypatch.setattr(
        "milesbatch.weights.mirror_push.Seals.accept_weights", lambda self, manifest: manifest.version < 6
    )
    assert [one.version for one in push_all(run, store)] == [1, 2, 3, 4, 5]


def test_it_holds_what_it_reads(run: RunLayout, store: PosixStore) -> None:
    push = Push(run, store)
    push.begin()
    versions = push.versions()
    next(versions)
    (hold,) = run.holds.glob("*.json")
    assert Hold.from_bytes(hold.read_bytes(), "").version == 0
    assert len(list(versions)) == 6 and not list(run.holds.glob("*.json"))


def test_above_the_limit_an_older_chain_goes_when_a_newer_keyframe_is_there(
    run: RunLayout, pushed: PosixStore, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    pull = Pull(pushed, here)
    with pull.taken():
        for version in range(6):
            pull.bring(version)
        assert names(here) == ["0 keyframe", *(f"{version} delta" for version in range(1, 6))]
        assert pull.shrink(5, 1 << 30) == ()
        assert list(verify(RunLayout(here))) == []
        with holding(RunLayout(here), 2, "a reader"):
            assert pull.shrink(5, 1) == ()
        assert pull.shrink(5, 1) == (3, 2, 1, 0)
        assert names(here) == ["4 delta", "4 keyframe", "5 delta"]
        assert pull.shrink(5, 1) == ()
        assert pull.bring(6).files == 1
    assert_holds(here, 6)
    assert list(verify(RunLayout(here))) == []


def test_dropping_killed_before_any_operation_leaves_whole_versions(pushed: PosixStore, tmp_path: Path) -> None:
    for lives in range(1, 20, 2):
        here = tmp_path / f"here-{lives}"
        pull = Pull(pushed, here)
        with pull.taken():
            for version in range(6):
                pull.bring(version)
            with installed(Mortal(lives)), contextlib.suppress(Killed):
                pull.shrink(5, 1)
            assert list(verify(RunLayout(here))) == []
            assert_holds(here, 5)


def test_a_follower_and_a_staged_model_go_on_in_a_pulled_directory(pushed: PosixStore, tmp_path: Path) -> None:
    here = tmp_path / "here"
    pull_one(pushed, here, 2)
    follower = Follower(RunLayout(here))
    with Staging(tmp_path / "stage", RunLayout(here)) as staging:
        for version in (2, 3, 4, 6):
            pull_one(pushed, here, version)
            assert follower.advance_to(version).version == version
            staging.advance_to(version)
            assert staging.current == version
    found, expected = load_file(tmp_path / "stage" / "model" / "model.safetensors"), make_tensors(6)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    fresh = Follower(RunLayout(here)).advance_to(6)
    assert follower.current is not None and fresh.weights_digest == follower.current.weights_digest


# -- damage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_in_the_store_is_named_and_gone_around(pushed: PosixStore, tmp_path: Path, how: str) -> None:
    path = payload(pushed, 4, "keyframe")
    if how == "flipped":
        spoil(path)
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 3)
    else:
        path.unlink()
    found = pull_one(pushed, tmp_path / "here", 6)
    assert len(found.damage) == 1 and str(path) in found.damage[0]
    assert "4 keyframe" not in names(tmp_path / "here"), "never visible"
    assert_holds(tmp_path / "here", 6)
    assert list(verify(RunLayout(tmp_path / "here"))) == []


def test_without_any_way_everything_found_is_named(pushed: PosixStore, tmp_path: Path) -> None:
    spoil(payload(pushed, 4, "keyframe"))
    spoil(payload(pushed, 3, "delta"))
    with pytest.raises(CorruptArtefactError) as raised:
        pull_one(pushed, tmp_path / "here", 5)
    assert "000004/keyframe" in raised.value.what and "000003/delta" in raised.value.what
    assert not RunLayout(tmp_path / "here").weights_manifest(5).exists()
    assert list(verify(RunLayout(tmp_path / "here"))) == []


def test_a_damaged_manifest_is_an_error_for_its_version_and_a_detour_for_later_ones(
    pushed: PosixStore, tmp_path: Path
) -> None:
    manifest = RunLayout(pushed.root).weights_manifest(5)
    spoil(manifest)
    with pytest.raises(CorruptArtefactError, match="000005/manifest"):
        pull_one(pushed, tmp_path / "here", 5)
    with pytest.raises(CorruptArtefactError, match="000005/manifest"):
        pull_one(pushed, tmp_path / "here", 6)
    pull_one(pushed, tmp_path / "here", 4)
    assert_holds(tmp_path / "here", 4)


def test_damage_in_the_run_is_left_out_and_told_once(run: RunLayout, store: PosixStore) -> None:
    (path,) = run.weights_version(5).glob("delta.*")
    spoil(path)
    push = Push(run, store)
    push.begin()
    found = {one.version: one for one in push.versions()}
    assert str(path) in found[5].damage and not found[6].damage
    assert not store.exists("weights/000005/manifest.json") and not list(store.list_keys("weights/000005"))
    assert list(push.versions()) == []
    spoil(path)  # mended
    assert [one.version for one in push.versions()] == [5]


def test_a_damaged_object_that_was_deleted_is_pushed_again(run: RunLayout, pushed: PosixStore, tmp_path: Path) -> None:
    path = payload(pushed, 4, "keyframe")
    path.unlink()
    assert [one.version for one in push_all(run, pushed) if not one.was_there] == [4]
    assert pull_one(pushed, tmp_path / "here", 4).damage == ()


def test_a_local_file_that_lost_its_end_or_is_gone_is_fetched_again(pushed: PosixStore, tmp_path: Path) -> None:
    here = tmp_path / "here"
    pull_one(pushed, here, 6)
    (full,), (delta,) = (RunLayout(here).weights_version(v).glob("*.safetensors") for v in (4, 5))
    os.truncate(full, 100)
    delta.unlink()
    assert pull_one(pushed, here, 6).files == 2
    assert_holds(here, 6)


def test_verify_names_a_version_whose_last_way_is_gone(pushed: PosixStore, tmp_path: Path) -> None:
    here = tmp_path / "here"
    pull_one(pushed, here, 5)
    payload(PosixStore(here), 4, "keyframe").unlink()
    found = list(verify(RunLayout(here)))
    assert {Path(one.path).parent.name for one in found} == {"000004", "000005"}


# -- killed at any moment ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL."""


class Mortal(Operations):
    """Dies before its n-th operation; nothing that is tried afterwards happens."""

    def __init__(self, lives: int) -> None:
        self._left = lives
        self._lock = threading.Lock()

    def _live(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise Killed

    def create(self, path: Path) -> BinaryIO:
        self._live()
        return super().create(path)

    def sync_file(self, path: Path, stream: BinaryIO) -> None:
        self._live()
        super().sync_file(path, stream)

    def link(self, source: Path, target: Path) -> None:
        self._live()
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)

    def make_directory(self, path: Path) -> None:
        self._live()
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._live()
        super().sync_directory(path)


def assert_each_manifest_has_its_payload(root: Path) -> None:
    layout = RunLayout(root)
    for path in layout.weights.glob("*/manifest.json"):
        for ref in json.loads(path.read_bytes())["files"]:
            assert (path.parent / ref["path"]).stat().st_size == ref["bytes"]


def test_a_push_killed_before_any_operation_is_gone_on_with(tmp_path: Path) -> None:
    run = make_weights_run(tmp_path / "run", range(3))
    lives, deaths = 0, 0
    while True:
        store = PosixStore(tmp_path / f"store-{lives}")
        try:
            with installed(Mortal(lives)):
                push_all(run, store)
            break
        except Killed:
            deaths += 1
        assert_each_manifest_has_its_payload(store.root)
        assert all(not one.damage for one in push_all(run, store))
        assert_each_manifest_has_its_payload(store.root)
        assert [path.name for path in sorted(RunLayout(store.root).weights.glob("*/manifest.json"))] == 3 * [
            "manifest.json"
        ]
        lives += 3
    assert deaths > 10


def test_a_pull_killed_before_any_operation_is_gone_on_with(pushed: PosixStore, tmp_path: Path) -> None:
    lives, deaths = 0, 0
    while True:
        here = tmp_path / f"here-{lives}"
        try:
            with installed(Mortal(lives)):
                pull_one(pushed, here, 6)
            break
        except Killed:
            deaths += 1
        if here.exists():
            assert list(verify(RunLayout(here))) == []
        pull_one(pushed, here, 6)
        assert_holds(here, 6)
        assert not list(here.rglob(".tmp-*.*")) and not list(RunLayout(here).weights.rglob(".tmp-*"))
        lives += 2
    assert deaths > 10


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_another_runs_weights_are_refused(run: RunLayout, pushed: PosixStore, tmp_path: Path) -> None:
    other = make_weights_run(tmp_path / "other", range(2))
    with pytest.raises(InputError, match="of run small-"):
        push_all(other, pushed)
    pull_one(pushed, tmp_path / "here", 1)
    others = PosixStore(tmp_path / "others")
    push_all(other, others)
    with pytest.raises(InputError, match="of run small-"):
        pull_one(others, tmp_path / "here", 1)


def test_other_weights_under_the_same_number_are_refused(run: RunLayout, pushed: PosixStore) -> None:
    layout = RunLayout(pushed.root)
    manifest = mirror_pull.read_manifest(layout, 6)
    assert manifest is not None
    layout.weights_manifest(6).write_bytes(manifest.model_copy(update={"weights_digest": "xxh128:0"}).to_bytes())
    with pytest.raises(InputError, match="has weights xxh128:0, the run has"):
        push_all(run, pushed)


def test_directories_of_others_are_refused(run: RunLayout, pushed: PosixStore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was not made by a pull"):
        pull_one(pushed, run.root, 1)
    with pytest.raises(InputError, match="holds no pushed weights"):
        pull_one(PosixStore(tmp_path / "none"), tmp_path / "here", 1)
    assert not (tmp_path / "here").exists()
    with pytest.raises(InputError, match="version 30 is not at"):
        pull_one(pushed, tmp_path / "here", 30)
    pull = Pull(pushed, tmp_path / "here")
    with pull.taken(), pytest.raises(InputError, match="another process is pulling"):
        pull_one(pushed, tmp_path / "here", 1)


def test_a_file_name_that_leads_out_is_refused(run: RunLayout, store: PosixStore, tmp_path: Path) -> None:
    whole = RunRecord.from_bytes(run.run_record.read_bytes(), "run.json")
    bad = FileRef(path="model/../../escaped", bytes=1, digest="xxh128:0")
    store.create_exclusively("run.json", whole.model_copy(update={"files": (bad,)}).to_bytes())
    with pytest.raises(KeyRefusedError, match="is not a key"):
        pull_one(store, tmp_path / "here", 1)


# -- commands ------------------------------------------------------------------------------------------------------------


def test_push_and_pull_as_commands(run: RunLayout, tmp_path: Path) -> None:
    url, here = tmp_path / "store", tmp_path / "here"
    result = invoke("push", run.root, url)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].startswith("version 0: keyframe, ")
    assert "7 versions pushed" in result.output.replace("\n", " ")
    body = json.loads(invoke("push", run.root, url, "--json").stdout)
    assert (body["pushed"], body["versions"], body["left_out"]) == ([], list(range(7)), [])
    body = json.loads(invoke("pull", url, here, "--json").stdout)
    assert [(row["version"], row["files"]) for row in body["pulled"]] == [(6, 3)]
    assert invoke("verify", here).exit_code == 0
    assert [row["version"] for row in json.loads(invoke("ls", here, "--json").stdout)] == [4, 5, 6]
    result = invoke("pull", url, here, "--limit", 0)
    assert result.exit_code == 0 and "dropped" not in result.output, "the chain begins with the newest keyframe"
    result = invoke("materialize", here, "--version", 5, "-o", tmp_path / "five")
    assert result.exit_code == 0 and (tmp_path / "five" / "tokenizer" / "vocab.json").exists()


def test_a_pull_of_what_was_never_pushed_makes_no_directory(run: RunLayout, pushed: PosixStore, tmp_path: Path) -> None:
    for url, words in ((pushed.root, "policy version 99 is not at"), (tmp_path / "nothing", "holds no pushed weights")):
        result = invoke("pull", url, tmp_path / "a" / "b", "--version", 99)
        assert isinstance(result.exception, InputError) and words in result.exception.what
        assert not (tmp_path / "a").exists()


def test_a_damaged_version_ends_a_push_with_1(run: RunLayout, tmp_path: Path) -> None:
    (path,) = run.weights_version(5).glob("delta.*")
    spoil(path)
    result = invoke("push", run.root, tmp_path / "store")
    assert result.exit_code == 1 and path.name in result.stderr.replace("\n", "")


def test_following_brings_each_version_until_the_one_that_was_asked_for(
    run: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_mirror, "LOOK_S", 0.02)
    store = PosixStore(tmp_path / "store")
    push = Push(run, store)
    push.begin()
    seen: list[Pulled] = []

    def follow() -> None:
        pull = Pull(store, tmp_path / "here")
        with pull.taken():
            seen.extend(weights_mirror._pulled(pull, 8, follow=True))

    thread = threading.Thread(target=follow)
    thread.start()
    for last in (6, 7, 8, 9):
        publish(run, range(last + 1))
        list(push.versions())
        time.sleep(0.2)
    thread.join(30)
    assert not thread.is_alive() and seen[-1].version == 8
    assert_holds(tmp_path / "here", 8)


def test_a_following_push_ends_with_the_run(run: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, False, True])

    class Status:
        def __init__(self, layout: RunLayout) -> None: ...

        def condition(self) -> Any:
            is_over = next(looks)
            if is_over:
                publish(run, range(9))  # just before the end
            return SimpleNamespace(is_over=is_over, state="failed", cause="no space left\nmore", exit_code=1)

    monkeypatch.setattr(following, "StatusReader", Status)
    monkeypatch.setattr(following, "LOOK_S", 0.01)
    monkeypatch.setattr(following, "_OVER_S", 0.0)
    result = invoke("push", run.root, tmp_path / "store", "--follow")
    assert result.exit_code == 1 and "9 versions pushed" in result.output.replace("\n", " ")
    assert "the run has ended: failed: no space left\n" in result.stderr


def test_without_the_extra_the_packages_are_named(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "s3a"):  # fsspec remembers a class that another test has used
        monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, protocol, raising=False)
    result = invoke("push", run.root, "s3://bucket/prefix", "--endpoint", "http://127.0.0.1:9")
    assert isinstance(result.exception, InputError)
    assert "pip install 'milesbatch[object-store]'" in result.exception.mend


def test_an_endpoint_with_a_directory_is_refused(run: RunLayout, tmp_path: Path) -> None:
    result = invoke("pull", tmp_path / "a", tmp_path / "b", "--endpoint", "http://127.0.0.1:9")
    assert isinstance(result.exception, InputError) and "--endpoint" in result.exception.what
