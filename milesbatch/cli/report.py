"""``milesbatch report``: a run as one HTML page, or its timeline for Perfetto.

Owns the words on the screen. Invariant: with ``--json`` standard output is one JSON document and nothing else. Imports without
torch. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.runs import find_run
from milesbatch.report.page.make import Written, write_page, write_trace


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.html", help="Default: NAME-report.html here.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE.json", help="Write the timeline for Perfetto; no page, unless -o is given."
        ),
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit/--no-audit", help="Prove the run for the page: reads every committed byte.")
    ] = True,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples", metavar="FILE.jsonl", help="Also write the samples that the page shows, one in each line."
        ),
    ] = None,
    track: Annotated[
        bool, typer.Option("--track", help="Also put what was written into the run's MLflow run, as artefacts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Write one self-contained HTML page about a run: curves, timeline, faults and restarts, lag, weights, samples, recipe.

    It opens offline, may be made while the run is going on, and changes nothing. What cannot be read is said on the page.
    """
    layout = find_run(run)
    written: dict[str, Written] = {}
    place = output or Path(f"{layout.root.resolve().name}-report.html")
    has_page = output is not None or samples is not None or trace is None
    check_outputs(trace, samples, place if has_page else None)
    if trace is not None:
        written["trace"] = write_trace(layout, trace)
    if has_page:
        written["page"] = write_page(layout, place, with_audit=audit, tell_progress=_tell, samples=samples)
        if samples is not None:
            written["samples"] = Written(samples, samples.stat().st_size, ())
    if track:
        from milesbatch.tracking.attach import MlflowRun  # imports MLflow

        MlflowRun(layout).add_files([file.path for file in written.values()])
        _tell("put into the run's MLflow run")
    if as_json:
        body = {kind: {"path": str(w.path), "bytes": w.bytes, "gaps": list(w.gaps)} for kind, w in written.items()}
        print(json.dumps(body, indent=1, ensure_ascii=False))
        return
    for kind, file in written.items():
        print(f"{kind}: {file.path} ({file.bytes:,} bytes)")
        for gap in file.gaps:
            _tell(f"note: {gap}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
