"""What a command writes for a person never lands on a file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.cli.outputs import check_outputs
from milesbatch.errors import InputError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory that is a run by its record."""
    place = tmp_path / "runs" / "one"
    (place / "batches").mkdir(parents=True)
    (place / "run.json").write_text("{}")
    return place


@pytest.mark.parametrize("inside", ["run.json", "batches/000001.json", "new.html", ".", "deeper/than/there"])
def test_a_place_inside_a_run_is_refused(run: Path, inside: str) -> None:
    with pytest.raises(InputError, match="is inside the run") as refused:
        check_outputs(run / inside)
    assert str(run) in refused.value.what and refused.value.mend


def test_links_and_dots_do_not_help(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "file").symlink_to(run / "run.json")
    for place in (tmp_path / "link" / "x.html", tmp_path / "file", run / ".." / "one" / "x", run / "batches" / ".."):
        with pytest.raises(InputError, match="is inside the run"):
            check_outputs(place)


def test_places_beside_runs_are_free(run: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    check_outputs(None, run.parent / "one-report.html", tmp_path / "trace.json", tmp_path / "loop")


def test_two_things_need_two_places(tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(tmp_path)
    with pytest.raises(InputError, match="are the same file"):
        check_outputs(tmp_path / "x.html", None, tmp_path / "same" / "x.html")


@pytest.mark.parametrize(
    "words",
    [
        "report {run} --no-audit -o {run}/run.json",
        "report {run} --trace {run}/batches/000001.json",
        "report {run} --no-audit --samples {run}/run.json -o {out}",
        "report {run} -o {out} --trace {out}",
        "traj export {run} -o {run}/x.parquet",
        "traj export {run} -o {run}/batches/000001.parquet --force",
        "traj sql {run} --force -o {run}/x.csv select",
        "drill recipes/tiny.yaml --report {run}/drill.html",
        "weights materialize {run} --version 0 -o {run}/model-0",
        "weights export {run} -o {run}/exported",
        "weights stage {run} -o {run}/staged",
        "weights import {out} -o {run}/imported",
        "weights push {run} {run}/store",
        "weights pull {out} {run}/pulled",
    ],
)
def test_every_command_that_writes_refuses(run: Path, tmp_path: Path, words: str) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    line = [word.format(run=run, out=tmp_path / "out.html") for word in words.split()]
    result = CliRunner().invoke(app, line)
    assert isinstance(result.exception, InputError), result.output
    assert "is inside the run" in result.exception.what or "are the same file" in result.exception.what
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
