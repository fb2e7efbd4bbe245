"""``python -m milesbatch.report.page.attach RUN PARENT_PID``: the report and its samples as artefacts of the run's MLflow run.

Started by the tracking process when a run has ended (``tracking/last_report.py``). Never: audits, which takes as long as it
takes; ``milesbatch report --track`` puts a page with the audit beside it. Invariant: it dies with its parent, and leaves
nothing behind in the run directory but what MLflow keeps there. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from milesbatch.cluster.local import die_with_parent
from milesbatch.errors import MilesbatchError
from milesbatch.report.page.make import write_page
from milesbatch.store.layout import RunLayout

PAGE, SAMPLES = "report.html", "samples.jsonl"
_NICE = 5
"""Somebody else's run may be going on here."""


def attach(layout: RunLayout) -> None:
    """Make both files and put them into the MLflow run, in place of earlier ones.

    Raises:
        MilesbatchError: there is no MLflow run, it cannot be reached, or the files cannot be written.
        OSError: the run has no directory for tracking.
    """
    from milesbatch.tracking.attach import MlflowRun  # imports MLflow

    os.chdir(layout.tracking)  # so that no letter of the run's own name means something else in a URI
    target = MlflowRun(layout, "sqlite:///mlflow.db")
    with tempfile.TemporaryDirectory(prefix="milesbatch-report-") as directory:
        page, samples = Path(directory) / PAGE, Path(directory) / SAMPLES
        write_page(layout, page, samples=samples, with_audit=False, tell_progress=print)
        target.add_files([page, samples])


def main(arguments: list[str]) -> int:
    """``RUN PARENT_PID``; what went wrong as the last line on standard error."""
    die_with_parent(int(arguments[1]))
    os.nice(_NICE)
    try:
        attach(RunLayout(Path(arguments[0]).resolve()))
    except MilesbatchError as error:
        print(f"error: {error.what}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
