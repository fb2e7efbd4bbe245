"""Which scripts are queued for a run, and finding its jobs again."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_recipe, make_run
from prepared_slurm import PreparedSlurm

from milesbatch.decisions.job_states import JobState
from milesbatch.errors import RunMismatchError, SlurmError, StorageError
from milesbatch.jobs.marks import mark
from milesbatch.jobs.order import Order, place_order
from milesbatch.jobs.submit import check_order, end_jobs, jobs_of, scripts_of, submit
from milesbatch.recipe.site import Site
from milesbatch.store.layout import RunLayout

SITE = Site(name="here", python="/venv/bin/python")


def order(root: Path, shape: str = "het", **slurm: object) -> Order:
    return place_order(RunLayout(root), make_recipe(slurm={"shape": shape, **slurm}), SITE, Path("/home/me"))


def queue_text(*jobs: tuple[str, str, str]) -> str:
    return "".join(f"{name}|{state}|None|n1|{comment}\n" for name, state, comment in jobs)


@pytest.mark.parametrize(("shape", "roles"), [("het", ["run"]), ("single", ["run"]), ("separate", ["run", "rollout"])])
def test_a_shape_needs_its_scripts(tmp_path: Path, shape: str, roles: list[str]) -> None:
    scripts = scripts_of(order(tmp_path / "run", shape), excluded=("n1", "n2"), after="7", cause="a lost node")
    assert [script.role for script in scripts] == roles
    assert "--excluded n1,n2 --after 7 --cause 'a lost node'" in scripts[0].text
    assert all("#SBATCH --exclude=n1,n2" in script.text for script in scripts)
    assert all(f"#SBATCH --comment={mark(RunLayout(tmp_path / 'run'), s.role)}" in s.text for s in scripts)
    assert ("milesbatch.jobs.join" in scripts[-1].text) == (shape == "separate")


def test_without_requeue_slurm_is_told_so(tmp_path: Path) -> None:
    assert "#SBATCH --no-requeue" in scripts_of(order(tmp_path / "run", requeue=False))[0].text


def test_submitting_makes_the_directories_and_keeps_the_scripts(fake: PreparedSlurm, tmp_path: Path) -> None:
    wanted = order(tmp_path / "run", "separate")
    scripts = scripts_of(wanted)
    assert submit(wanted, scripts) == {"run": "101", "rollout": "102"}
    assert fake.submitted() == [script.text for script in scripts]
    jobs = wanted.layout.jobs
    assert wanted.recipe_file.exists() and wanted.site_file.exists() and wanted.layout.logs.is_dir()
    assert [(jobs / f"{number}_submission.sh").read_text() for number in (101, 102)] == [s.text for s in scripts]


def test_when_a_later_script_is_refused_the_earlier_is_taken_back(fake: PreparedSlurm, tmp_path: Path) -> None:
    wanted = order(tmp_path / "run", "separate")
    (fake.path / "sbatch").write_text(
        "#!/bin/sh\ncase \"$(/bin/cat $1)\" in *jobs.join*) echo 'sbatch: error: no' >&2; exit 1;; esac\n"
        "echo Submitted batch job 7\n"
    )
    with pytest.raises(SlurmError, match="sbatch: error: no"):
        submit(wanted, scripts_of(wanted))
    assert fake.said_to("scancel") == [("7",)]


def test_a_run_directory_that_cannot_be_made_is_named(fake: PreparedSlurm, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = order(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match="file"):
        submit(wanted, scripts_of(wanted))
    assert fake.calls == []


def test_a_directory_of_another_recipe_is_refused_and_a_new_or_own_one_is_not(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    check_order(order(tmp_path / "run"))
    check_order(order(tmp_path / "new"))
    other = place_order(RunLayout(tmp_path / "run"), make_recipe(seed=1), SITE)
    with pytest.raises(RunMismatchError, match=r"seed: 0 -> 1"):
        check_order(other)


# -- finding jobs again -----------------------------------------------------------------------------------------------


def test_a_mark_is_one_directorys_and_holds_nothing_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "a b|c").mkdir()
    (tmp_path / "link").symlink_to("a b|c")
    odd = mark(RunLayout(tmp_path / "a b|c"), "run")
    assert odd == mark(RunLayout(tmp_path / "link"), "run")
    assert odd != mark(RunLayout(tmp_path / "other"), "run") and odd != mark(RunLayout(tmp_path / "a b|c"), "rollout")
    assert set(odd) <= set("milesbatch:run0123456789abcdef")


def test_jobs_of_a_run_are_found_by_their_comment(fake: PreparedSlurm, tmp_path: Path) -> None:
    layout, other = RunLayout(tmp_path / "run"), RunLayout(tmp_path / "other")
    fake.answer(
        "squeue",
        queue_text(
            ("40", "PENDING", mark(layout, "rollout")),
            ("33+1", "RUNNING", mark(layout, "run")),
            ("33+0", "RUNNING", mark(layout, "run")),
            ("34", "RUNNING", mark(other, "run")),
            ("35", "COMPLETED", mark(layout, "run")),
            ("36", "RUNNING", "somebody else's"),
        ),
    )
    found = [(job.job_id, job.role, job.state) for job in jobs_of(layout)]
    assert found == [("33", "run", JobState.LIVE), ("40", "rollout", JobState.PENDING)]


def test_ending_jobs_of_a_role(fake: PreparedSlurm, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    text = queue_text(
        *((name, "RUNNING", mark(layout, role)) for name, role in (("9", "rollout"), ("8", "rollout"), ("7", "run")))
    )
    fake.answer("squeue", text)
    assert end_jobs(layout, "rollout") == ["8", "9"]
    assert fake.said_to("scancel") == [("8",), ("9",)]
