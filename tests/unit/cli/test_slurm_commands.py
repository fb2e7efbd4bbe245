"""``milesbatch submit``, ``cancel``, ``resume`` and ``scale`` as they are typed, against prepared answers of Slurm.

Every mistake must end as one text on standard error and the right exit code, never as a traceback.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import grow, make_run, past_incarnation
from prepared_slurm import PreparedSlurm

from milesbatch.cli.main import main
from milesbatch.errors import EXIT_NOT_WELL, EXIT_TEMPFAIL, EXIT_USAGE
from milesbatch.jobs.marks import mark
from milesbatch.recipe.load import load_recipe
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_fork

RECIPE = "name: tiny\nsteps: 3\nmodel: {kind: made}\ndata: {kind: arithmetic}\n"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class Shell:
    """A user with a recipe, a site and an empty ``runs`` in the current directory."""

    def __init__(self, directory: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capture = capture
        (directory / "tiny.yaml").write_text(RECIPE)
        self.site("here", "python: /venv/bin/python\n")

    def site(self, name: str, text: str) -> None:
        path = self.directory / "conf" / "milesbatch" / "sites" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"name: {name}\n{text}")

    def __call__(self, *words: str) -> Said:
        before, handler, argv = list(sys.path), signal.getsignal(signal.SIGTERM), sys.argv
        sys.argv = ["milesbatch", *words]
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.path[:], sys.argv = before, argv
            signal.signal(signal.SIGTERM, handler)
        said = self._capture.readouterr()
        assert "Traceback" not in said.err + said.out
        assert isinstance(code, int | None)
        return Said(code or 0, said.out, said.err)

    def run(self, name: str = "tiny") -> RunLayout:
        return RunLayout(self.directory / "runs" / name)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedSlurm:
    made = PreparedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(made.path))
    return made


@pytest.fixture
def shell(
    fake: PreparedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "conf"))
    for name in ("MILESBATCH_SITE", "MILESBATCH_RUNS", "SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    return Shell(home, capsys)


SUBMIT = ("submit", "tiny.yaml", "--site", "here")


# -- submit -----------------------------------------------------------------------------------------------------------


def test_submitting_queues_the_run_and_says_where_to_look_next(shell: Shell, fake: PreparedSlurm) -> None:
    said = shell(*SUBMIT)
    run = shell.run()
    assert (said.code, said.out) == (0, "")
    assert "run job 101" in said.err
    for command in ("status", "logs", "cancel"):
        assert f"milesbatch {command} {run.root}" in said.err
    (script,) = fake.submitted()
    assert f"#SBATCH --chdir={shell.directory}" in script
    assert (run.jobs / "101_submission.sh").read_text() == script


def test_two_jobs_are_both_told_and_an_odd_directory_is_quoted(shell: Shell) -> None:
    odd = "it's"
    said = shell(*SUBMIT, "--set", "slurm.shape=separate", "--run-dir", f"my runs/{odd}")
    assert said.code == 0
    assert "run job 101\nrollout job 102" in said.err
    assert f"milesbatch status {shlex.quote(f'{shell.directory}/my runs/{odd}')}" in said.err


def test_a_dry_run_prints_the_scripts_and_queues_nothing(shell: Shell, fake: PreparedSlurm) -> None:
    fake.answer("sbatch", err="sbatch: Job 26 to start at 2026-11-29T23:17:13 on n1\n", when="--test-only")
    said = shell(*SUBMIT, "--dry-run", "--set", "slurm.shape=separate")
    assert said.code == 0
    assert said.out.count("#!/bin/bash\n") == 2 and said.out.rstrip().splitlines()[-1].startswith(
        "exec /venv/bin/python"
    )
    assert said.err.count("Job 26 to start") == 2
    assert fake.submitted() == [] and not shell.run().root.exists()


def test_a_dry_run_needs_no_slurm(shell: Shell, fake: PreparedSlurm) -> None:
    fake.remove("sbatch")
    said = shell(*SUBMIT, "--dry-run")
    assert (said.code, said.out.startswith("#!/bin/bash")) == (0, True)
    assert "not checked by sbatch: there is no command sbatch" in said.err


def test_a_dry_run_of_a_job_that_sbatch_refuses_is_not_well(shell: Shell, fake: PreparedSlurm) -> None:
    fake.answer("sbatch", err="sbatch: error: Invalid account", status=1, when="--test-only")
    said = shell(*SUBMIT, "--dry-run")
    assert (said.code, said.out.startswith("#!/bin/bash")) == (EXIT_USAGE, True)
    assert "sbatch refuses the job: sbatch: error: Invalid account" in said.err


def test_the_site_may_come_from_the_environment_and_say_where_runs_live(
    shell: Shell, fake: PreparedSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shell.site("big", "runs_directory: $SCRATCH/runs\n")
    monkeypatch.setenv("MILESBATCH_SITE", "big")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    assert shell("submit", "tiny.yaml").code == 0
    assert (tmp_path / "scratch" / "runs" / "tiny" / "jobs").is_dir()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("submit", "tiny.yaml"), ["no site was given", "MILESBATCH_SITE"]),
        (("submit", "tiny.yaml", "--site", "heer"), ["there is no site heer; known: here"]),
        (("submit", "tiny.yaml", "--site", "./x.yaml"), ["the site file x.yaml does not exist"]),
        (("submit", "tiny.yaml", "--site", "wrong"), ["wrong.yaml", "did you mean `shapes`?"]),
        ((*SUBMIT, "--set", "slurm.shape=both"), ["slurm.shape", 'found "both"; allowed: one of `het`']),
        ((*SUBMIT, "--set", "slurm.shap=het"), ["did you mean `slurm.shape`?"]),
        (("submit", "tinny.yaml", "--site", "here"), ["there is no recipe tinny.yaml"]),
        (("submit", "tiny.yaml", "--site", "small"), ["slurm.shape is het, which site small cannot run"]),
        (
            ("submit", "tiny.yaml", "--site", "small", "--set", "slurm.shape=single"),
            ["slurm.time_limit_minutes is 60; site small allows 30"],
        ),
        (("submit", "tiny.yaml", "--site", "scratch"), ["a variable in the path $SCRATCH/x is not set"]),
        (("submit", "tiny.yaml", "--site", "template"), ["the template ", "cannot be read"]),
        ((*SUBMIT, "--run-dir", "a\\b"), ["cannot be told to Slurm", "plainer name"]),
        ((*SUBMIT, "--run-dir", "tiny.yaml"), ["tiny.yaml is a file", "--run-dir"]),
        (("submit",), ["Missing argument 'RECIPE'"]),
    ],
)
def test_wrong_input_is_refused_before_anything_is_queued(
    shell: Shell, fake: PreparedSlurm, words: tuple[str, ...], says: list[str]
) -> None:
    shell.site("small", "shapes: [single]\nmax_time_minutes: 30\n")
    shell.site("wrong", "shape: [single]\n")
    shell.site("scratch", "runs_directory: $SCRATCH/x\n")
    shell.site("template", "template: batch.sh\n")
    said = shell(*words)
    assert said.code == EXIT_USAGE, said.err
    for part in says:
        assert part in said.err, said.err
    assert fake.submitted() == [] and not (shell.directory / "runs").exists()


def test_a_directory_of_another_recipe_is_refused(shell: Shell, fake: PreparedSlurm) -> None:
    make_run(shell.run().root)
    said = shell(*SUBMIT)
    assert said.code == EXIT_USAGE
    assert "is a run of another recipe" in said.err and "name: 'small' -> 'tiny'" in said.err
    assert "--fork NEW_RUN" in said.err
    assert fake.submitted() == []


def test_a_fork_takes_the_state_over_at_once_and_queues_the_new_run(shell: Shell, fake: PreparedSlurm) -> None:
    make_run(shell.run().root, load_recipe(shell.directory / "tiny.yaml"))
    before = shell.run().run_record.read_bytes()
    changed = ("--fork", "other", "--set", "trainer.optimizer.learning_rate=1e-6")
    said = shell(*SUBMIT, *changed, "--dry-run")
    assert said.code == 0 and "other would begin with step 0 of" in said.err, said.err
    assert str(shell.run("other").root) in said.out
    assert not shell.run("other").root.exists() and list(shell.run().holds.iterdir()) == []
    refused = shell(*SUBMIT, "--fork", "other", "--set", "model.hidden_size=64", "--dry-run")
    assert refused.code == EXIT_USAGE and "a fork keeps its parent's model" in refused.err
    said = shell(*SUBMIT, *changed)
    assert said.code == 0, said.err
    other = shell.run("other")
    assert "other begins with step 0 of" in said.err and f"milesbatch status {other.root}" in said.err
    fork = read_fork(other)
    assert fork is not None and fork.forked_from.run_id in before.decode()
    status = shell("status", str(other.root), "--json")
    assert json.loads(status.out)["forked_from"]["run_id"] == fork.forked_from.run_id, status.err
    audit = shell("audit", str(other.root))
    assert audit.code == EXIT_USAGE and "was not started yet" in audit.err and "milesbatch resume" in audit.err
    _tried, script = fake.submitted()  # the first by --dry-run, with --test-only
    assert str(other.root) in script and shell.run().run_record.read_bytes() == before
    again = shell(
        "submit", "tiny.yaml", "--site", "here", "--run-dir", str(other.root), "--set", "model.hidden_size=64"
    )
    assert again.code == EXIT_USAGE and "a fork keeps its parent's model" in again.err
    assert len(fake.submitted()) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("7|PENDING|Priority|", "job 7 of {run} is pending (Priority)"),
        ("7|RUNNING|None|n1", "job 7 of {run} is live\n"),
    ],
    ids=["pending", "running"],
)
def test_a_run_that_is_queued_or_runs_is_not_queued_twice(
    shell: Shell, fake: PreparedSlurm, line: str, says: str
) -> None:
    fake.answer("squeue", f"{line}|{mark(shell.run(), 'run')}\n")
    said = shell(*SUBMIT)
    assert said.code == EXIT_TEMPFAIL
    assert says.format(run=shell.run().root) in said.err and "milesbatch cancel" in said.err
    assert fake.submitted() == []


def test_rollout_jobs_alone_do_not_hold_a_run(shell: Shell, fake: PreparedSlurm) -> None:
    fake.answer("squeue", f"7|RUNNING|None|n1|{mark(shell.run(), 'rollout')}\n")
    assert shell(*SUBMIT).code == 0


def test_a_refusal_of_sbatch_is_repeated(shell: Shell, fake: PreparedSlurm) -> None:
    fake.answer("sbatch", err="sbatch: error: Batch job submission failed: Invalid account\n", status=1)
    said = shell(*SUBMIT)
    assert said.code == EXIT_USAGE
    assert "sbatch refuses the job: sbatch: error: Batch job submission failed: Invalid account" in said.err


# -- no Slurm at all --------------------------------------------------------------------------------------------------


@pytest.fixture
def submitted(shell: Shell) -> Shell:
    assert shell(*SUBMIT).code == 0
    return shell


@pytest.mark.parametrize("words", [SUBMIT, ("cancel", "tiny"), ("resume", "tiny"), ("scale", "tiny", "--rollout", "4")])
@pytest.mark.parametrize("how", ["not installed", "silent", "not answering"])
def test_without_slurm_each_command_says_so(
    submitted: Shell, fake: PreparedSlurm, words: tuple[str, ...], how: str
) -> None:
    if how == "not installed":
        for name in ("sbatch", "squeue", "scontrol", "scancel", "srun"):
            fake.remove(name)
        says = "there is no command squeue"
    else:
        says = "Unable to contact slurm controller" if how == "silent" else "welcome to squeue"
        fake.answer("squeue", "welcome to squeue\n")
        if how == "silent":
            fake.answer("squeue", err=says, status=1)
    said = submitted(*words)
    assert said.code == EXIT_NOT_WELL
    assert says in said.err and "what to do:" in said.err


# -- cancel, resume, scale --------------------------------------------------------------------------------------------


def test_a_queued_run_can_be_cancelled_by_name_before_it_began(submitted: Shell, fake: PreparedSlurm) -> None:
    fake.answer("squeue", f"101|PENDING|Priority||{mark(submitted.run(), 'run')}\n")
    said = submitted("cancel", "tiny")
    assert (said.code, said.err) == (0, "job 101 was ended\n")
    assert fake.said_to("scancel") == [("101",)]


def test_cancelling_what_does_not_run_says_so(submitted: Shell) -> None:
    said = submitted("cancel", str(submitted.run().root), "--now")
    assert said.code == 0 and "was not running, and no job of it by this user is queued" in said.err


def test_resuming_queues_the_last_order_again(submitted: Shell, fake: PreparedSlurm) -> None:
    said = submitted("resume", "tiny")
    assert (said.code, said.err) == (0, "run job 102\n")
    first, second = fake.submitted()
    assert second == first.replace("milesbatch submit", "milesbatch resume")


def test_resuming_a_queued_run_is_refused(submitted: Shell, fake: PreparedSlurm) -> None:
    fake.answer("squeue", f"101|PENDING|Priority||{mark(submitted.run(), 'run')}\n")
    said = submitted("resume", "tiny")
    assert said.code == EXIT_TEMPFAIL and "is pending (Priority)" in said.err


def test_scaling_says_what_it_did(submitted: Shell, fake: PreparedSlurm) -> None:
    fake.answer("squeue", f"101|RUNNING|None|n1|{mark(submitted.run(), 'run')}\n")
    said = submitted("scale", "tiny", "--rollout", "6")
    assert said.code == 0
    assert (
        said.err
        == "rollout job 102 was submitted\nrollout job 103 was submitted\n6 rollout workers when all jobs run\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("scale", "tiny", "--rollout", "3"), "3 rollout workers cannot be reached"),
        (("scale", "tiny", "--rollout", "-1"), "Invalid value for '--rollout'"),
        (("scale", "tiny"), "Missing option '--rollout'"),
        (("cancel", "tinny"), "there is no run at"),
        (("resume", "tinny"), "submitted: tiny"),
        (("scale", "tinny", "--rollout", "4"), "there is no run at"),
        (("cancel",), "Missing argument 'RUN'"),
        (("resume", "local"), "was never submitted to Slurm"),
        (("scale", "local", "--rollout", "4"), "was never submitted to Slurm"),
    ],
)
def test_wrong_words_are_refused(submitted: Shell, fake: PreparedSlurm, words: tuple[str, ...], says: str) -> None:
    make_run(submitted.run("local").root)
    before = len(fake.calls)
    said = submitted(*words)
    assert said.code == EXIT_USAGE
    assert says in said.err
    assert len(fake.submitted()) == 1 and len(fake.calls) == before


def test_a_finished_run_is_not_queued_again(shell: Shell, fake: PreparedSlurm) -> None:
    layout = make_run(shell.run("small").root)
    (shell.directory / "small.yaml").write_text(layout.recipe.read_text())
    assert shell("submit", "small.yaml", "--site", "here").code == 0
    assert past_incarnation(layout) == 1
    grow(layout, 8)
    for words in (("submit", "small.yaml", "--site", "here"), ("resume", "small")):
        said = shell(*words)
        assert said.code == 0 and said.err.endswith("runs/small is finished; nothing was queued\n")
    assert len(fake.submitted()) == 1
    assert shell("submit", "small.yaml", "--site", "here", "--set", "steps=9").code == 0, "more steps are asked for"
