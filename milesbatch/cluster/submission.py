"""Handing a batch script to sbatch, through submitit. Needs no torch: a login node submits.

Owns: the step from a script's text to a job id. Never: the text (``script.py``). submitit writes the file, calls sbatch and
reads the job id; what it cannot do (heterogeneous jobs, a batch process that replaces the shell) comes in through its own
seam, the text of the submission file. Its pickles and its watcher, which needs Slurm's accounting, are not used. It works in a
temporary folder: it gives ``%`` in a folder's name a meaning, and leaves links behind. Source: submitit 1.5,
``slurm/slurm.py``; https://github.com/facebookincubator/submitit/issues/1741 (heterogeneous jobs). See
``docs/decisions/0005-through-submitit.md``.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from milesbatch.cluster.slurm import ask_slurm, cancel, is_unreachable
from milesbatch.errors import JobRefusedError, SlurmError, StorageError
from milesbatch.store.durable import replace_hint


def submit_script(text: str, folder: Path) -> str:
    """Queue a batch script; returns the job id (the leader's, of a heterogeneous job). ``folder`` keeps the script.

    Raises:
        SlurmError: sbatch is not there, or refuses; says why.
        StorageError: the script cannot be kept; nothing is queued.
    """
    with tempfile.TemporaryDirectory(prefix="milesbatch-") as scratch:
        job_id = _submit(text, Path(scratch))
    try:
        replace_hint(folder / f"{job_id}_submission.sh", text.encode())
    except StorageError:
        cancel(job_id)
        raise
    return job_id


def _submit(text: str, folder: Path) -> str:
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class ScriptExecutor(SlurmExecutor):
        """Submits a text that was made elsewhere."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return text

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # sbatch's words are in the error, once
            return str(ScriptExecutor(folder=folder)._submit_command("").job_id)
    except FailedJobError as error:
        said = _reason(str(error))
        if is_unreachable(said):
            raise SlurmError(
                f"the job cannot be submitted: {said}", mend="ask again later", may_be_asked_again=True
            ) from error
        raise refused(said) from error
    except FailedSubmissionError as error:
        raise SlurmError(
            f"sbatch said no job id: {error}", mend="look with `squeue --me` whether the job is queued all the same"
        ) from error
    except (RuntimeError, OSError) as error:
        raise SlurmError(
            f"the job cannot be submitted: {error}", mend="load Slurm's client commands (PATH), or use `milesbatch run`"
        ) from error


def test_only(script: Path) -> str:
    """What sbatch says about a script without queueing it: when and where it would start.

    Raises:
        JobRefusedError: sbatch would refuse it. SlurmError: it is not there, or does not answer.
    """
    try:
        ended = ask_slurm(["sbatch", "--test-only", str(script)])
    except SlurmError as error:
        if error.said and not error.may_be_asked_again:
            raise refused(error.said) from error
        raise
    return (ended.stdout + ended.stderr).strip()


def refused(said: str) -> JobRefusedError:
    """The error for a job that sbatch does not take, for what it ``said``."""
    return JobRefusedError(
        f"sbatch refuses the job: {said}",
        mend="correct the site file, or slurm.* in the recipe: `milesbatch doctor --site SITE` names the partitions that there"
        " are; --dry-run shows the script",
    )


def _reason(text: str) -> str:
    """The lines of sbatch within submitit's message."""
    lines = [line.strip() for line in text.splitlines() if "sbatch" in line and "error" in line]
    return "; ".join(lines) or text.strip()
