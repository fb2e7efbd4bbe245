"""From a script's text to a job id, through submitit and a prepared sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest
from prepared_slurm import PreparedSlurm

from milesbatch.cluster import submission
from milesbatch.errors import SlurmError, StorageError

TEXT = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2\n\nexec true 'é'\n"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    made = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(made.path))
    return made


@pytest.mark.parametrize("name", ["jobs", "50% %j %a", 'it\'s "quoted"'])
def test_the_script_reaches_sbatch_and_stays_beside_the_run(fake: PreparedSlurm, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert submission.submit_script(TEXT, folder) == "101"
    assert submission.submit_script(TEXT, folder) == "102"
    assert fake.submitted() == [TEXT, TEXT]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "101_submission.sh": TEXT,
        "102_submission.sh": TEXT,
    }


def test_a_refusal_repeats_the_words_of_sbatch_once(
    fake: PreparedSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed\nmore\n"
    fake.answer("sbatch", err=said, status=1)
    with pytest.raises(SlurmError) as caught:
        submission.submit_script(TEXT, tmp_path)
    assert caught.value.what == (
        "sbatch refuses the job: sbatch: error: invalid partition specified: nope; sbatch: error: Batch job submission failed"
    )
    assert "--dry-run" in caught.value.mend
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.glob("*.sh")) == []


def test_a_refusal_without_words_of_sbatch_is_repeated_as_it_is(fake: PreparedSlurm, tmp_path: Path) -> None:
    fake.answer("sbatch", err="allocation failure: Invalid feature specification\n", status=1)
    with pytest.raises(SlurmError, match="Invalid feature specification"):
        submission.submit_script(TEXT, tmp_path)


def test_an_answer_without_a_job_id_says_that_the_job_may_be_queued(fake: PreparedSlurm, tmp_path: Path) -> None:
    fake.answer("sbatch", "welcome to our cluster\n")
    with pytest.raises(SlurmError, match="welcome to our cluster") as caught:
        submission.submit_script(TEXT, tmp_path)
    assert "squeue --me" in caught.value.mend


@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_without_slurms_commands_the_error_says_what_to_load(fake: PreparedSlurm, tmp_path: Path, command: str) -> None:
    fake.remove(command)
    with pytest.raises(SlurmError) as caught:
        submission.submit_script(TEXT, tmp_path)
    assert command in str(caught.value) and "milesbatch run" in str(caught.value)


def test_a_job_whose_script_cannot_be_kept_is_taken_back(fake: PreparedSlurm, tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        submission.submit_script(TEXT, tmp_path / "missing")
    assert fake.said_to("scancel") == [("101",)]


def test_sbatch_says_on_standard_error_when_a_script_would_start(fake: PreparedSlurm, tmp_path: Path) -> None:
    said = "sbatch: Job 26 to start at 2026-11-29T23:17:13 using 6 processors on n1\n"
    fake.answer("sbatch", err=said, when="--test-only")
    assert submission.test_only(tmp_path / "x.sh") == said.strip()
    fake.answer("sbatch", err="allocation failure: Invalid partition name specified\n", status=1, when="--test-only")
    with pytest.raises(SlurmError, match="Invalid partition name"):
        submission.test_only(tmp_path / "x.sh")
