"""``milesbatch weights stage``: a model directory on this machine that follows a run.

Owns the words on the screen and the waiting for new versions. Imports without torch. The page behind it is
``docs/format-weights.md``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from milesbatch.cli.documents import print_json
from milesbatch.cli.following import End, looks
from milesbatch.cli.names_in_files import refuse_other_names
from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.runs import find_run
from milesbatch.errors import InputError
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import Seals, read_incarnations
from milesbatch.weights.reader import committed_versions, is_retired, require_version
from milesbatch.weights.staging import Staging


def stage(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Staging directory: new, or of an earlier call.")
    ],
    version: Annotated[int | None, typer.Option("--version", min=0, help="Policy version; else the newest.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with each new version, until the run is over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Keep DIR/model the newest policy version (or one version), as a Hugging Face directory, writing only what changes.

    For a local disk or tmpfs. Read DIR/model only between two versions: `state.json` has no target then. With --follow the exit
    code is that of the run's end: 0 finished, 1 failed, 75 stopped.
    """
    if follow and version is not None:
        raise InputError("--follow goes on with new versions, --version asks for one", mend="give one of the two")
    layout = find_run(run)
    check_outputs(output)
    refuse_other_names(layout, "a staged model")
    if version is not None:
        require_version(layout, version)
    end = End()
    staged: list[dict[str, object]] = []
    with Staging(
        output, layout, accept=lambda manifest: Seals(read_incarnations(layout)).accept_weights(manifest)
    ) as staging:
        for name in staging.mended:
            print(f"{staging.model / name} was not the run's, and is again", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # it ends the following; what is staged stays
            _follow(layout, staging, version, follow, staged, as_json, end)
        if as_json:
            print_json({"version": staging.current, "model": str(staging.model), "staged": staged})
    if code := end.tell():
        raise typer.Exit(code)


def _follow(
    layout: RunLayout,
    staging: Staging,
    version: int | None,
    follow: bool,
    staged: list[dict[str, object]],
    as_json: bool,
    end: End,
) -> None:
    for _ in looks(layout, follow=follow, end=end):
        wanted = version if version is not None else _newest(layout)
        if wanted is None and not follow:
            raise InputError(f"{layout.root} has no policy version yet", mend="see `milesbatch weights ls`")
        if wanted is not None and wanted != staging.current:
            began_s = time.monotonic()
            with holding(layout, wanted, "weights stage"):
                manifest = staging.advance_to(wanted)
            seconds = round(time.monotonic() - began_s, 3)
            staged.append({"version": wanted, "digest": manifest.weights_digest, "seconds": seconds})
            if not as_json:
                print(
                    f"{staging.model} is policy version {wanted} ({manifest.weights_digest}), {seconds} s", flush=True
                )
        elif wanted is not None and not follow and not as_json:
            print(f"{staging.model} is policy version {wanted} already")


def _newest(layout: RunLayout) -> int | None:
    return next((number for number in reversed(committed_versions(layout)) if not is_retired(layout, number)), None)
