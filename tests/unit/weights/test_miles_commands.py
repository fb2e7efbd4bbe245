"""``weights export`` and ``weights import``: what they print, how following ends, and bad input in one line."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from miles_made import (
    bits,
    make_tensors,
    publish,
    publish_peer,
    retire,
)
from safetensors.torch import load_file
from typer.testing import CliRunner

from milesbatch.cli import following
from milesbatch.cli import weights as cli
from milesbatch.errors import MilesbatchError
from milesbatch.store.layout import RunLayout
from milesbatch.weights.digest import weights_digest
from milesbatch.weights.listing import rows
from milesbatch.weights.miles_import import rebuild_published
from milesbatch.weights.miles_layout import published_versions


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_export_and_import_as_commands(whole: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("export", whole.root, "--layout", "miles", "-o", out, "--to", 4)
    assert result.exit_code == 0, result.output
    lines = result.output.replace("\n" + str(out), " " + str(out)).splitlines()
    assert lines[0].startswith("version 0: full, 7 tensors, ") and lines[0].endswith("(it is the first)")
    assert lines[3].startswith("version 3: delta, 0 tensors, 0 B") and "5 policy versions, 0 to 4" in lines[5]
    body = json.loads(invoke("export", whole.root, "-o", out, "--json").stdout)
    assert [row["version"] for row in body["exported"]] == [5] and body["versions"] == list(range(6))
    assert "nothing new" in invoke("export", whole.root, "-o", out).output
    result = invoke("import", out, "--version", 4, "-o", tmp_path / "four")
    assert result.exit_code == 0, result.output
    found = load_file(tmp_path / "four" / "model.safetensors")
    assert bits(found) == bits(make_tensors(1, 4))
    assert json.loads((tmp_path / "four" / "config.json").read_text())["model_type"] == "made"
    assert {path.name for path in (tmp_path / "four").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    body = json.loads(invoke("import", out, "-o", tmp_path / "newest", "--json").stdout)
    assert (body["version"], body["deltas"], body["unproven"]) == (5, 5, [])
    assert body["digest"] == rows(whole)[5].digest


def test_commands_refuse_in_one_line(whole: RunLayout, tmp_path: Path, base: Path) -> None:
    publish_peer(tmp_path / "peer", [1, 2])
    (tmp_path / "none").mkdir()
    for arguments, words in (
        (("export", whole.root, "-o", tmp_path / "a", "--from", 3, "--to", 2), "--from 3 is after --to 2"),
        (("export", whole.root, "-o", tmp_path / "a", "--from", 30), "policy version 30 is not published"),
        (("export", whole.root, "-o", tmp_path / "peer"), "was not written by"),
        (("import", tmp_path / "peer", "--version", 7, "-o", tmp_path / "b"), "holds no version 7"),
        (
            ("import", tmp_path / "peer", "--version", 2, "-o", tmp_path / "b"),
            "builds on version 0, which is not there",
        ),
        (
            ("import", tmp_path / "peer", "--version", 1, "--base", tmp_path / "nonexist", "-o", tmp_path / "b"),
            "nonexist is not a directory",
        ),
        (("import", tmp_path / "gone", "-o", tmp_path / "b"), "is not a directory"),
        (("import", tmp_path / "none", "-o", tmp_path / "b"), "holds no versions"),
        (("import", tmp_path / "peer", "-o", base, "--base", base), "not an empty directory"),
        (("import", tmp_path / "peer", "-o", tmp_path / "b", "--base", tmp_path / "none"), r"holds no *.safetensors"),
    ):
        result = invoke(*arguments)
        assert isinstance(result.exception, MilesbatchError), arguments
        assert words in result.exception.what and result.exception.mend, result.exception
    assert not (tmp_path / "b").exists()


def test_unproven_tensors_are_told(tmp_path: Path, base: Path) -> None:
    publish_peer(tmp_path / "peer", [1, 2])
    result = invoke("import", tmp_path / "peer", "--base", base, "-o", tmp_path / "two")
    assert result.exit_code == 0 and "no checksum covers 1 tensor of the full checkpoint: frozen" in result.output


def test_following_ends_with_the_asked_version(
    whole: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LOOK_S", 0.01)
    monkeypatch.setattr(following.StatusReader, "condition", lambda reader: SimpleNamespace(is_over=False))

    def go_on() -> None:
        for version in range(6, 9):
            time.sleep(0.05)
            publish(whole, range(version, version + 1))

    thread = threading.Thread(target=go_on)
    thread.start()
    result = invoke("export", whole.root, "-o", tmp_path / "out", "--from", 5, "--to", 8, "--follow")
    thread.join()
    assert result.exit_code == 0, result.output
    assert published_versions(tmp_path / "out") == [5, 6, 7, 8]
    assert rebuild_published(tmp_path / "out", 8).deltas == 3


@pytest.mark.parametrize(
    ("state", "cause", "code", "said"),
    [
        ("finished", None, 0, "finished"),
        ("failed", "step 3: no space left\nmore", 1, "failed: step 3: no space left"),
        ("stopped", None, 75, "stopped"),
    ],
)
def test_following_ends_with_the_run(
    whole: RunLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    cause: str | None,
    code: int,
    said: str,
) -> None:
    """What was published between the last look and the end is there too."""

    def condition(reader: object) -> SimpleNamespace:
        publish(whole, range(6, 7))
        return SimpleNamespace(is_over=True, state=state, cause=cause, exit_code=code)

    monkeypatch.setattr(following.StatusReader, "condition", condition)
    result = invoke("export", whole.root, "-o", tmp_path / "out", "-f")
    assert result.exit_code == code, result.output
    assert f"the run has ended: {said}\n" in result.stderr
    assert published_versions(tmp_path / "out") == list(range(7))


def test_a_damaged_version_is_gone_around_and_told(whole: RunLayout, tmp_path: Path) -> None:
    """Version 7 has a full copy: readers go on from there. What is behind it is not asked for again."""
    out = tmp_path / "out"
    publish(whole, range(6, 8))
    (payload,) = whole.weights_version(5).glob("delta.*")
    payload.write_bytes(b"damaged")
    result = invoke("export", whole.root, "-o", out)
    assert result.exit_code == 1, result.output
    for version in (5, 6):
        assert f"version {version} is left out: policy version {version} cannot be rebuilt" in result.stderr
    assert "version 7: full" in result.stdout and "(version 6 is not here)" in result.stdout
    assert published_versions(out) == [0, 1, 2, 3, 4, 7] and weights_of(out, 7) == rows(whole)[7].digest
    result = invoke("export", whole.root, "-o", out)
    assert result.exit_code == 0 and "nothing new" in result.stdout


def test_a_cut_manifest_does_not_end_the_export(whole: RunLayout, tmp_path: Path) -> None:
    whole.weights_manifest(3).write_bytes(whole.weights_manifest(3).read_bytes()[:100])
    result = invoke("export", whole.root, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["left_out"] == [3]
    assert published_versions(tmp_path / "out") == [0, 1, 2, 4, 5]
    assert weights_of(tmp_path / "out", 5) == rows(whole, [])[-1].digest


@pytest.mark.parametrize("gone", [0, 2, 3, 5])
def test_a_version_that_went_from_the_directory_comes_back(whole: RunLayout, tmp_path: Path, gone: int) -> None:
    out = tmp_path / "out"
    assert invoke("export", whole.root, "-o", out).exit_code == 0
    shutil.rmtree(out / f"weight_v{gone:06d}")
    result = invoke("export", whole.root, "-o", out)
    assert result.exit_code == 0 and f"version {gone}: " in result.stdout, result.output
    assert published_versions(out) == list(range(6)) and weights_of(out, 5) == rows(whole)[5].digest


def test_a_gap_that_cannot_be_filled_is_told_and_ends_with_a_full_copy(whole: RunLayout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke("export", whole.root, "-o", out).exit_code == 0
    shutil.rmtree(out / "weight_v000002")
    for version in range(4):
        retire(whole, version)
    result = invoke("export", whole.root, "-o", out)
    assert result.exit_code == 1 and "versions 2 are not in the directory" in result.stderr
    publish(whole, range(6, 8))
    result = invoke("export", whole.root, "-o", out)
    assert result.exit_code == 0 and "version 6: full" in result.stdout and "version 7: delta" in result.stdout
    assert weights_of(out, 7) == rows(whole)[7].digest


@pytest.mark.parametrize(
    "name",
    [
        "weight_v000003/model.safetensors.index.json",
        "weight_v000002/model-00000-of-00001.safetensors",
        "weight_v000000/model.safetensors",
        "weight_v000000/config.json",
    ],
)
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_file_that_went_from_the_directory_is_named(whole: RunLayout, tmp_path: Path, name: str, how: str) -> None:
    out = tmp_path / "out"
    assert invoke("export", whole.root, "-o", out).exit_code == 0
    path = out / name
    if how == "gone":
        path.unlink()
    elif name.endswith("config.json"):
        return  # its digest is compared by who reads it
    else:
        path.write_bytes(path.read_bytes()[:50])
    result = invoke("export", whole.root, "-o", out)
    assert isinstance(result.exception, MilesbatchError) and result.exception.exit_code == 1
    assert str(path) in result.exception.what and "remove this version's directory" in result.exception.mend
    shutil.rmtree(path.parent)
    assert invoke("export", whole.root, "-o", out).exit_code == 0
    assert weights_of(out, 5) == rows(whole)[5].digest


def weights_of(out: Path, version: int) -> str:
    tensors = rebuild_published(out, version).tensors
    return weights_digest((name, tensor.dtype, tensor.shape, tensor.digest) for name, tensor in tensors.items())


def test_a_directory_of_other_things_is_refused_and_a_failed_export_makes_none(
    whole: RunLayout, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("kept")
    result = invoke("export", whole.root, "-o", tmp_path / "mine")
    assert isinstance(result.exception, MilesbatchError) and "it holds thesis.txt" in result.exception.what
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    result = invoke("export", whole.root, "-o", tmp_path / "a" / "b", "--from", 30)
    assert isinstance(result.exception, MilesbatchError) and not (tmp_path / "a").exists()
