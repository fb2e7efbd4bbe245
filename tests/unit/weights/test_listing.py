"""``weights ls`` and ``weights verify``: what they say about a sound run and about each kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from builders import grow, make_incarnation, make_run
from safetensors.torch import load_file
from typer.testing import CliRunner

from milesbatch.cli import weights as cli
from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.records import Retirement, Seal
from milesbatch.store.layout import RunLayout
from milesbatch.weights.listing import rows, verify
from milesbatch.weights.publisher import Publisher
from milesbatch.weights.reader import RetiredError, read_manifest

Make = Callable[[int], dict[str, torch.Tensor]]
Damage = Callable[[int, str], Path]


def found(layout: RunLayout) -> list[tuple[str, str]]:
    return [(violation.kind, violation.path) for violation in verify(layout)]


def manifest_path(version: int) -> str:
    return f"weights/{version:06d}/manifest.json"


def test_rows_say_what_is_there(layout: RunLayout, chain: Publisher) -> None:
    layout.weights_version(7).mkdir()
    (layout.weights / "notes").mkdir()
    listed = rows(layout)
    assert [row.version for row in listed] == list(range(7))
    assert [row.kind for row in listed[:4]] == ["keyframe", "delta", "delta", "keyframe"]
    elements = 64 * 32 + 128 * 48 + 300 + 50 + 1
    assert {row.elements for row in listed} == {elements}
    assert listed[0].changed == elements and listed[1].changed == 40 + 122 + 6 + 1
    on_disk = sum(path.stat().st_size for path in layout.weights_version(3).glob("*.safetensors"))
    assert (listed[3].bytes, listed[3].path, listed[3].incarnation) == (on_disk, "weights/000003", 1)


def test_an_empty_run_has_no_rows_and_no_violations(layout: RunLayout, tmp_path: Path) -> None:
    for empty in (layout, RunLayout(tmp_path / "nothing")):
        assert rows(empty) == [] and found(empty) == []


def test_a_sound_run_has_no_violations(layout: RunLayout, chain: Publisher) -> None:
    assert found(layout) == []


def test_a_damaged_delta_breaks_the_chain_up_to_the_next_keyframe(
    layout: RunLayout, chain: Publisher, damage: Damage
) -> None:
    path = damage(1, "delta")
    violations = list(verify(layout))
    assert [(v.kind, v.path) for v in violations] == [("file", manifest_path(1)), ("chain", manifest_path(2))]
    assert str(path) in violations[0].detail


def test_every_damaged_file_is_found(layout: RunLayout, chain: Publisher, damage: Damage) -> None:
    damage(1, "delta")
    damage(2, "delta")
    damage(3, "keyframe")
    damage(6, "keyframe")
    kinds = [("file", 1), ("file", 2), ("chain", 2), ("file", 3), ("chain", 4), ("chain", 5), ("file", 6)]
    assert found(layout) == [(kind, manifest_path(version)) for kind, version in kinds]


def test_a_lost_or_damaged_manifest_is_found(layout: RunLayout, chain: Publisher) -> None:
    layout.weights_manifest(1).write_bytes(b"{}")
    layout.weights_manifest(4).unlink()
    assert found(layout) == [
        ("missing", manifest_path(4)),
        ("manifest", manifest_path(1)),
        ("chain", manifest_path(2)),
        ("chain", manifest_path(5)),
    ]


def test_a_version_of_which_nothing_is_left_is_missed(tmp_path: Path) -> None:
    """Between others, the first one, and the newest of which only other records tell."""
    for gone, code in ((3, 1), (0, 1), (6, 1), (None, 0)):
        layout = make_run(tmp_path / f"without-{gone}")
        grow(layout, 6)
        if gone is not None:
            shutil.rmtree(layout.weights_version(gone))
        result = CliRunner().invoke(cli.app, ["verify", str(layout.root), "--json"])
        missing = [row["path"] for row in json.loads(result.stdout)["violations"] if row["kind"] == "missing"]
        assert (result.exit_code, missing) == (code, [] if gone is None else [manifest_path(gone)])
    layout = make_run(tmp_path / "without-checkpoints")
    grow(layout, 6, checkpoint_every=100)
    for version in (5, 6):
        shutil.rmtree(layout.weights_version(version))
    assert found(layout) == [], "versions 5 and 6 may not have been published yet"
    shutil.rmtree(layout.weights_version(4))
    assert found(layout) == [("missing", manifest_path(4))]


def test_what_the_newest_life_may_still_publish_again_is_not_missed(tmp_path: Path) -> None:
    """Its seal accepted less than the one before had recorded; what the seal accepted must be there."""
    layout = make_run(tmp_path / "run")
    grow(layout, 6)
    for version in (4, 5, 6):
        shutil.rmtree(layout.weights_version(version))
    seal = Seal(last_batch=6, last_version=3, checkpoints=(2, 4, 6), trajectories=())
    for number, accepted in ((1, None), (2, seal)):
        record = make_incarnation(number) if accepted is None else make_incarnation(number, seal=accepted)
        layout.incarnation(number).write_bytes(record.to_bytes())
    assert found(layout) == []
    shutil.rmtree(layout.weights_version(3))
    assert found(layout) == [("missing", manifest_path(3))]


@pytest.mark.parametrize("damage", [b"", b"{", b"{}\n"])
def test_ls_lists_the_others_and_names_a_damaged_manifest(whole: RunLayout, damage: bytes) -> None:
    whole.weights_manifest(2).write_bytes(damage)
    for flags in ([], ["--json"]):
        result = CliRunner().invoke(cli.app, ["ls", str(whole.root), *flags])
        assert result.exit_code == 1
        assert "weights/000002/manifest.json" in result.stderr and "audit" not in result.stderr
    assert [row["version"] for row in json.loads(result.stdout)] == [0, 1, 3, 4, 5]


def test_in_a_store_a_damaged_manifest_is_mended_by_pushing_again(whole: RunLayout, tmp_path: Path) -> None:
    store = RunLayout(tmp_path / "store")
    shutil.copytree(whole.weights, store.weights)
    store.weights_manifest(2).write_bytes(b"{")
    with pytest.raises(CorruptArtefactError) as caught:
        read_manifest(store, 2)
    assert "push that version again" in caught.value.mend
    store.weights_manifest(2).write_bytes(store.weights_manifest(1).read_bytes())
    store.mirror.write_text("{}")
    with pytest.raises(CorruptArtefactError) as caught:
        read_manifest(store, 2)
    assert "weights pull` again" in caught.value.mend
    shutil.rmtree(store.weights_version(3))
    assert "missing" not in {kind for kind, _ in found(store)}, "a copy may have holes"


def test_a_chain_that_gives_other_weights_is_found(layout: RunLayout, tmp_path: Path, version_tensors: Make) -> None:
    """Files that are each as committed, but of two histories: only the digests of the result can tell."""
    other = RunLayout(tmp_path / "other")
    for target, shift in ((layout, 0.0), (other, 1.0)):
        publisher = Publisher(target, 1, keyframe_every=10, before_commit=lambda: None)
        for version in range(3):
            tensors = version_tensors(version)
            tensors["layer.weight"] += shift
            publisher.publish(version, tensors.items(), {})
    layout.weights_version(1).rename(layout.quarantine / "1")
    other.weights_version(1).rename(layout.weights_version(1))
    assert found(layout) == [("digest", manifest_path(1)), ("chain", manifest_path(2))]


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, layout: RunLayout) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr(cli, "find_run", lambda text: RunLayout(layout.root.parent / text))
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    return invoke


def test_ls(layout: RunLayout, chain: Publisher, run: Callable[..., tuple[int, str]]) -> None:
    code, text = run("ls", "run", "--json")
    body = json.loads(text)
    assert code == 0 and len(body) == 7
    assert set(body[0]) >= {"version", "kind", "bytes", "elements", "changed", "digest", "incarnation", "path"}
    code, text = run("ls", "run")
    assert code == 0 and "7 policy versions" in text
    assert body[5]["digest"].removeprefix("xxh128:")[:12] in text


def test_verify_exits_with_1_when_something_is_damaged(
    layout: RunLayout, chain: Publisher, damage: Damage, run: Callable[..., tuple[int, str]]
) -> None:
    code, text = run("verify", "run")
    assert code == 0 and "7 policy versions verified" in text
    code, text = run("verify", "run", "--json")
    assert (code, json.loads(text)) == (0, {"ok": True, "versions": 7, "retired": 0, "violations": []})
    damage(5, "delta")
    code, text = run("verify", "run", "--json")
    body = json.loads(text)
    assert code == 1 and not body["ok"]
    assert [(v["kind"], v["path"]) for v in body["violations"]] == [("file", manifest_path(5))]
    code, text = run("verify", "run")
    assert code == 1 and "1 violations in 7 policy versions" in text


def test_materialize(layout: RunLayout, chain: Publisher, tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    (layout.model / "config.json").write_text("{}")
    code, text = run("materialize", "run", "--version", "4", "-o", str(tmp_path / "out"), "--json")
    assert code == 0 and json.loads(text)["digest"] == rows(layout)[4].digest
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(InputError):
        run("materialize", "run", "--version", "4", "-o", str(tmp_path / "out"))
    assert run("materialize", "run", "-o", str(tmp_path / "other"))[0] == 2
    assert run("materialize", "run", "--version", "-1", "-o", str(tmp_path / "other"))[0] == 2


def test_help_has_an_example(run: Callable[..., tuple[int, str]]) -> None:
    for command in ("ls", "verify", "materialize"):
        code, text = run(command, "--help")
        assert code == 0 and f"milesbatch weights {command} runs/tiny" in " ".join(text.split())


def retire(layout: RunLayout, versions: Iterable[int], base: int = 3) -> None:
    for version in versions:
        record = Retirement(
            version=version, incarnation=1, base=base, needed=base, checkpoint=base + 2, staleness=1, created_at="now"
        )
        layout.weights_retirement(version).write_bytes(record.to_bytes())
        for path in layout.weights_version(version).glob("*.safetensors"):
            path.unlink()


def test_retired_versions_are_listed_as_such(
    layout: RunLayout, chain: Publisher, run: Callable[..., tuple[int, str]]
) -> None:
    retire(layout, range(3))
    assert [row.retired for row in rows(layout)] == [True] * 3 + [False] * 4
    assert found(layout) == []
    listed = json.loads(run("ls", "run", "--json")[1])
    assert [row["retired"] for row in listed] == [True] * 3 + [False] * 4
    text = run("ls", "run")[1]
    assert "4 of them kept" in text and text.count("(retired)") == 3
    assert json.loads(run("verify", "run", "--json")[1]) == {"ok": True, "versions": 4, "retired": 3, "violations": []}
    assert "4 policy versions verified" in run("verify", "run")[1]


def test_a_retirement_that_was_killed_midway_is_no_damage(layout: RunLayout, chain: Publisher) -> None:
    """Versions 1 and 2 cannot be rebuilt without version 0, and nothing needs them."""
    retire(layout, [0])
    assert found(layout) == []


def test_damage_around_retired_versions_is_still_found(layout: RunLayout, chain: Publisher, damage: Damage) -> None:
    retire(layout, range(3))
    damage(4, "delta")
    assert found(layout) == [("file", manifest_path(4)), ("chain", manifest_path(5))]
    path = layout.weights_retirement(1)
    path.write_bytes(path.read_bytes().replace(b"now", b"new"))
    assert ("retirement", "weights/000001/retired.json") in found(layout)


def test_missing_files_without_a_retirement_are_damage(layout: RunLayout, chain: Publisher) -> None:
    retire(layout, range(3))
    layout.weights_retirement(2).unlink()
    assert ("file", manifest_path(2)) in found(layout)


def test_a_retired_version_cannot_be_materialized(
    layout: RunLayout, chain: Publisher, tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    (layout.model).mkdir(exist_ok=True)
    retire(layout, range(3))
    with pytest.raises(RetiredError, match="version 2 was retired"):
        run("materialize", "run", "--version", "2", "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert list(layout.holds.iterdir()) == []


def test_bytes_are_told_by_encoding(layout: RunLayout) -> None:
    """From the headers of deltas; they sum up to what is on disk."""
    publisher = Publisher(layout, 1, keyframe_every=2, before_commit=lambda: None)
    made = torch.Generator().manual_seed(5)
    few = torch.randn(5000, generator=made).bfloat16()
    for version in range(4):
        few.view(torch.int16)[version::200] += 1
        dense = torch.randint(2**60, (700,), generator=made)
        publisher.publish(version, {"few": few, "dense": dense, "same": torch.ones(9)}.items(), {})
    first, delta, both, last = rows(layout)
    assert first.bytes_by_encoding == {"keyframe": first.bytes}
    for row in (delta, both):
        assert row.bytes_by_encoding is not None and sum(row.bytes_by_encoding.values()) == row.bytes
        (payload,) = layout.weights_version(row.version).glob("delta.*")
        stored = {name: tensor.numel() for name, tensor in load_file(payload).items()}
        assert set(stored) == {"few", "dense"}
        assert row.bytes_by_encoding["steps-zstd"] == stored["few"]
        (of_dense,) = set(row.bytes_by_encoding) - {"steps-zstd", "headers", "keyframe"}
        assert row.bytes_by_encoding[of_dense] == stored["dense"] > stored["few"]
    assert both.bytes_by_encoding["keyframe"] == next(layout.weights_version(2).glob("keyframe.*")).stat().st_size
    next(layout.weights_version(3).glob("delta.*")).unlink()
    assert rows(layout)[3].bytes_by_encoding is None and last.bytes_by_encoding is not None
    next(layout.weights_version(1).glob("delta.*")).write_bytes(b"no such file")
    assert rows(layout)[1].bytes_by_encoding is None


def test_ls_shows_bytes_by_encoding(layout: RunLayout, chain: Publisher, run: Callable[..., tuple[int, str]]) -> None:
    listed = json.loads(run("ls", "run", "--json")[1])
    assert all(sum(row["bytes_by_encoding"].values()) == row["bytes"] for row in listed)
    text = run("ls", "run")[1]
    assert "delta by encoding" in text
    assert f"steps-zstd {listed[1]['bytes_by_encoding']['steps-zstd']:,}" in text
    next(layout.weights_version(4).glob("delta.*")).unlink()
    assert "not known" in run("ls", "run")[1]
