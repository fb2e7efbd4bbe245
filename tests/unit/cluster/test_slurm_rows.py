"""Lines of squeue: a comment with line breaks, of any job of the user, disables nothing."""

from __future__ import annotations

import pytest
from prepared_slurm import PreparedSlurm

from milesbatch.cluster import slurm
from milesbatch.errors import SlurmError


@pytest.fixture
def fake(tmp_path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:  # type: ignore[no-untyped-def]
    prepared = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{prepared.path}:/usr/bin:/bin")
    return prepared


def test_what_does_not_begin_like_a_job_belongs_to_the_line_before(fake: PreparedSlurm) -> None:
    fake.answer("squeue", "7|RUNNING|None|n1|foo\nbar\n8_2|RUNNING|None|n1|\n9+1|PENDING|Priority||mine\n", when="--me")
    assert [(job.job_id, job.het_offset, job.comment) for job in slurm.my_jobs()] == [("7", 0, "foo"), ("9", 1, "mine")]


def test_an_answer_that_is_none_is_still_named(fake: PreparedSlurm) -> None:
    fake.answer("squeue", "welcome to our cluster\n", when="--me")
    with pytest.raises(SlurmError, match="welcome to our cluster"):
        slurm.my_jobs()


@pytest.mark.parametrize("said", ["Unexpected message received for job 5", "Unable to contact slurm controller"])
def test_a_slurmctld_that_is_away_may_be_asked_again(said: str) -> None:
    assert slurm.is_unreachable(said)
