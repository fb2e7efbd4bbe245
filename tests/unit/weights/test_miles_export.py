"""Export in Miles' layout: an independent follower gets the published bits; what is there is never written again."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from miles_made import (
    DELTA,
    INDEX,
    bits,
    export_all,
    exporter,
    make_tensors,
    publish,
    publish_peer,
    retire,
    snapshot,
)
from miles_reader import Puller

from milesbatch.errors import InputError, StorageError
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, installed
from milesbatch.weights.miles_export import Exporter
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import RetiredError


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_knows_only_the_description_follows(layout: RunLayout, tmp_path: Path, seed: int) -> None:
    (layout.model / "config.json").write_text("{}")
    publish(layout, range(6), seed)
    out = tmp_path / "out"
    made = export_all(layout, out)
    assert [one.kind for one in made] == ["full", *["delta"] * 5]
    assert [one.changed for one in made] == [7, 5, 5, 0, 5, 5]
    engine = Puller(tmp_path / "local", out / "weight_v000000", out)
    for target in (0, 1, 3, 5):
        engine.pull(target)
        assert engine.tensors() == bits(make_tensors(seed, target))
    assert engine.applied == ["full 0", *(f"delta {version}" for version in range(1, 6))]
    late = Puller(tmp_path / "late", out / "weight_v000000", out)
    late.pull(5)
    assert late.tensors() == engine.tensors()


def test_a_later_first_version_is_full_and_readers_begin_there(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [(one.version, one.kind) for one in export_all(small_run, out, 2, 4)] == [
        (2, "full"),
        (3, "delta"),
        (4, "delta"),
    ]
    engine = Puller(tmp_path / "local", tmp_path / "nowhere", out)
    engine.pull(4)
    assert engine.tensors() == bits(make_tensors(1, 4)) and engine.applied == ["full 2", "delta 3", "delta 4"]


def test_a_full_checkpoint_is_a_model_directory_and_its_delta_is_small(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out)
    full = out / "weight_v000000"
    assert {path.name for path in full.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors", INDEX}
    assert json.loads((full / INDEX).read_text())["weight_map"] == dict.fromkeys(
        make_tensors(1, 0), "model.safetensors"
    )
    assert {path.name for path in (out / "weight_v000001").iterdir()} == {DELTA, INDEX}
    assert {path.name for path in (out / "weight_v000003").iterdir()} == {INDEX}
    metadata = json.loads((out / "weight_v000005" / INDEX).read_text())["metadata"]
    assert metadata.pop("weights_digest").startswith("xxh128:")
    assert metadata == {
        "version": "000005",
        "base_version": "000004",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }


def test_what_is_there_is_continued_and_never_written_again(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out, None, 3)
    before = snapshot(out)
    assert [one.version for one in export_all(small_run, out)] == [4, 5]
    assert export_all(small_run, out) == []
    assert exporter(small_run, out).export(2) is None
    publish(small_run, range(6, 8))
    assert [(one.version, one.kind) for one in export_all(small_run, out)] == [(6, "delta"), (7, "delta")]
    assert snapshot(out).items() >= before.items()
    engine = Puller(tmp_path / "local", out / "weight_v000000", out)
    engine.pull(7)
    assert engine.tensors() == bits(make_tensors(1, 7))


class Watched(Operations):
    """Looks at the directory at each operation; may fail from one on, as if the process had been killed there."""

    def __init__(self, out: Path, last: int = 1 << 30) -> None:
        self.out, self.last, self.count = out, last, 0
        self.states: set[tuple[str, ...]] = set()

    def look(self) -> None:
        self.count += 1
        seen = []
        for directory in self.out.glob("weight_v*"):
            index = json.loads((directory / INDEX).read_text())
            assert all((directory / file).is_file() for file in index["weight_map"].values())
            seen.append(directory.name)
        self.states.add(tuple(sorted(seen)))
        if self.count > self.last:
            raise OSError(5, "killed")


for _name in ("create", "sync_file", "sync_directory", "link", "rename", "replace", "unlink", "make_directory"):

    def _make(name: str) -> Callable[..., Any]:
        def operation(self: Watched, *arguments: Any) -> Any:
            self.look()
            return getattr(Operations, name)(self, *arguments)

        return operation

    setattr(Watched, _name, _make(_name))


def test_a_version_is_seen_whole_or_not_at_all(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with installed(watched := Watched(out)):
        export_all(small_run, out, None, 2)
    names = [f"weight_v{version:06d}" for version in range(3)]
    assert watched.states == {tuple(names[:count]) for count in range(4)}


def test_killed_at_any_operation_and_given_again(small_run: RunLayout, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with installed(watched := Watched(whole)):
        export_all(small_run, whole, None, 1)
    expected = {name: data for name, (data, _) in snapshot(whole).items()}
    for last in range(watched.count):
        out = tmp_path / f"out-{last}"
        with installed(Watched(out, last)), pytest.raises(StorageError):
            export_all(small_run, out, None, 1)
        export_all(small_run, out, None, 1)
        found = {name: data for name, (data, _) in snapshot(out).items() if not name.startswith(".tmp-")}
        assert found == expected, last


def test_what_a_killed_exporter_left_goes_and_what_a_living_one_writes_stays(
    small_run: RunLayout, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    dead, alive = (out / f".tmp-{socket.gethostname()}-{pid}-0a0b" for pid in (2**22 + 1, os.getpid()))
    for path in (dead, alive):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"half")
    exporter(small_run, out)
    assert not dead.exists() and alive.exists()


def test_another_exporter_was_quicker(small_run: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    slow = exporter(small_run, out)
    before = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path.name != "weight_v000000" and before(path))
    export_all(small_run, out, 0, 0)
    files = snapshot(out)
    assert slow.export(0) is None
    assert snapshot(out) == files  # nothing changed, and nothing is left


def test_retired_versions_are_passed_over_by_a_full_checkpoint(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out, None, 1)
    for version in (1, 2, 3):
        retire(small_run, version)
    made = export_all(small_run, out)
    assert [(one.version, one.kind, one.because) for one in made] == [
        (4, "full", "version 3 is not here"),
        (5, "delta", ""),
    ]
    engine = Puller(tmp_path / "local", out / "weight_v000000", out)
    engine.pull(1)
    engine.pull(5)
    assert engine.tensors() == bits(make_tensors(1, 5)) and engine.applied[-2:] == ["full 4", "delta 5"]
    with pytest.raises(RetiredError, match="version 2 was retired"):
        exporter(small_run, out).export(2)


def test_a_version_behind_a_retired_one_that_is_here_is_full(small_run: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_all(small_run, out, None, 3)
    for version in range(4):
        retire(small_run, version)
    assert [(one.version, one.kind) for one in export_all(small_run, out)] == [(4, "full"), (5, "delta")]


def test_other_tensors_make_a_full_checkpoint(small_run: RunLayout, tmp_path: Path) -> None:
    publisher = Publisher(small_run, 1, keyframe_every=100, before_commit=lambda: None)
    publisher.seed(5)
    publisher.publish(6, {**make_tensors(1, 6), "new": torch.ones(3)}.items(), {})
    made = export_all(small_run, tmp_path / "out", 5)
    assert [(one.kind, one.because) for one in made] == [
        ("full", "version 4 is not here"),
        ("full", "version 5 has other tensors"),
    ]


def test_versions_that_do_not_count_are_left_out(small_run: RunLayout, tmp_path: Path) -> None:
    one = Exporter(small_run, tmp_path / "out", lambda: lambda manifest: manifest.version < 4)
    assert one.due(None, None) == [0, 1, 2, 3]


def test_a_directory_of_something_else_is_refused(small_run: RunLayout, tmp_path: Path) -> None:
    other = RunLayout(tmp_path / "other")
    for directory in other.directories():
        directory.mkdir(parents=True)
    (other.model / "config.json").write_text("{}")
    publish(other, range(2), seed=2)
    export_all(other, tmp_path / "theirs")
    with pytest.raises(InputError, match=r"weight_v000001 has weights digest xxh128:\w+; version 1 of .* has xxh128:"):
        exporter(small_run, tmp_path / "theirs")
    publish_peer(tmp_path / "peer", [1])
    with pytest.raises(InputError, match="was not written by `milesbatch weights export`"):
        exporter(small_run, tmp_path / "peer")
    export_all(small_run, tmp_path / "longer")
    with pytest.raises(InputError, match=r"version 5 of .* is not published"):
        exporter(other, tmp_path / "longer")
