"""The report of a run that has ended, put into its MLflow run without being asked.

Owns: the time limit, and that nothing of it can fail the tracking process. Never: makes the page itself: that is done by a
process of its own (``report/page/attach.py``), which can be ended. Invariant: it begins after the last figure is logged, when
no other process of the run works any more. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import os

from milesbatch.cluster.local import run_limited
from milesbatch.recipe.models import Tracking
from milesbatch.store.layout import RunLayout

LIMIT_S = 60.0
"""For making and uploading; the controller waits a little longer."""
MODULE = "milesbatch.report.page.attach"


def wants_report(tracking: Tracking) -> bool:
    """Does the recipe ask for it, and can its tracker keep files?"""
    return tracking.report and tracking.kind == "mlflow"


def attach_report(layout: RunLayout) -> None:
    """Make the report and put it into the MLflow run, within ``LIMIT_S``; says what came of it, and never raises for it."""
    why = run_limited(MODULE, [str(layout.root), str(os.getpid())], LIMIT_S)
    if why is None:
        print("the report is in the MLflow run", flush=True)
    else:
        by_hand = f"`milesbatch report {layout.root} --track` does it by hand"
        print(f"no report in the MLflow run: {why}; {by_hand}", flush=True)
