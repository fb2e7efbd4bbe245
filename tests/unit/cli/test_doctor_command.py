"""``milesbatch doctor`` as it is typed: with and without a site, with and without Slurm's commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prepared_slurm import PreparedSlurm
from typer.testing import CliRunner

from milesbatch.cli import doctor as command
from milesbatch.cli.main import app
from milesbatch.doctor import filesystem, machine
from milesbatch.doctor.child import ChildAnswer
from milesbatch.doctor.verdict import bad
from milesbatch.errors import UsageError

RECORDED = Path(__file__).parents[1] / "doctor" / "recorded"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch is not asked for, and the environment names no site."""
    body = {"torch": "2.9", "cuda": None, "nccl": None, "devices": []}
    monkeypatch.setattr(machine, "run_probe", lambda probe: ChildAnswer(body))
    monkeypatch.delenv("MILESBATCH_SITE", raising=False)
    monkeypatch.setenv("MILESBATCH_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    fake = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(fake.path))
    fake.answer("scontrol", (RECORDED / "show-config.txt").read_text(), when="show config")
    fake.answer("scontrol", (RECORDED / "show-partition.txt").read_text(), when="show partition")
    fake.answer("sbatch", err="sbatch: Job 7 to start at noon\n", when="--test-only")
    return fake


@pytest.fixture
def site(tmp_path: Path) -> str:
    path = tmp_path / "here.yaml"
    path.write_text(
        "name: here\ntrainer: {partition: trainer}\nrollout: {partition: rollout}\nruns_directory: "
        + str(tmp_path)
        + "\n"
    )
    return str(path)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words])


def test_one_machine_without_slurm(tmp_path: Path) -> None:
    ended = run("--run-dir", str(tmp_path))
    assert ended.exit_code == 0, ended.stdout
    lines = ended.stdout.splitlines()
    assert "  not checked what another host sees: only this host was asked" in lines
    assert "  not checked everything about Slurm: no site was given" in lines
    assert lines[-1].startswith("fit: ") and lines[-1].endswith("2 not checked")


def test_json_is_one_document(tmp_path: Path) -> None:
    ended = run("--json")
    body = json.loads(ended.stdout)
    assert body["ok"] is True and "slurm: everything about Slurm" in body["not_checked"]
    assert {"area", "name", "level", "found", "meaning", "mend"} == set(body["checks"][0])
    place = next(check for check in body["checks"] if check["name"] == "place")
    assert str(tmp_path) in place["found"]


def test_something_bad_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = bad("filesystem", "atomic link", "none", "two may win", "choose another")
    monkeypatch.setattr(command, "filesystem_checks", lambda directory: [broken])
    ended = run("--run-dir", str(tmp_path))
    assert ended.exit_code == 1
    assert "  bad         atomic link: none" in ended.stdout
    assert "what to do: choose another" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("not fit: ")


def test_a_site_without_slurms_commands(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = run("--site", site)
    assert ended.exit_code == 1
    assert "bad         answers: there is no command scontrol" in ended.stdout
    assert "not checked two nodes: Slurm does not answer" in ended.stdout


def test_a_site_without_a_job(site: str, slurm: PreparedSlurm) -> None:
    ended = run("--site", site, "--no-job")
    assert ended.exit_code == 0, ended.stdout
    assert "not checked two nodes: left out with --no-job" in ended.stdout
    assert "jobs of shape het: sbatch would take it (60 minutes): Job 7 to start at noon" in ended.stdout
    assert not slurm.submitted()


def test_no_job_where_sbatch_refuses(site: str, slurm: PreparedSlurm) -> None:
    slurm.answer("sbatch", err="sbatch: error: Invalid account\n", status=1, when="--test-only")
    ended = run("--site", site)
    assert ended.exit_code == 1 and "not checked two nodes: sbatch refuses" in ended.stdout
    assert not slurm.submitted()


def test_no_job_on_a_filesystem_that_is_bad_already(
    site: str, slurm: PreparedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "room_checks", lambda there: [bad("filesystem", "space", "none", "m", "d")])
    ended = run("--site", site)
    assert ended.exit_code == 1 and "not checked two nodes: the filesystem is bad already" in ended.stdout
    assert not slurm.submitted()


def test_an_unknown_site() -> None:
    ended = run("--site", "nowhere")
    assert "there is no site nowhere" in str(ended.exception)
    assert not isinstance(ended.exception, UsageError)
