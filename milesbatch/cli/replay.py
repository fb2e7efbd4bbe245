"""``milesbatch replay``: compute a recorded step again from the files alone, and compare loss and weights digest."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from milesbatch.cli.runs import find_run
from milesbatch.cluster.local import run_ranks
from milesbatch.errors import EXIT_NOT_WELL, InputError, RunFailedError
from milesbatch.report.summary import step_events
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import open_run
from milesbatch.store.survey import read_incarnations
from milesbatch.weights.reader import read_manifest


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    step: Annotated[int, typer.Option("--step", min=1, help="The step to compute again.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Compute a step again from its recorded batch, with as many ranks as the run has; nothing in the run changes.

    Starts from the newest checkpoint below the step. Exit code 1 when loss or weights digest differ from the recorded ones.
    """
    layout = find_run(run)
    incarnations = read_incarnations(layout)
    if not incarnations:
        raise InputError(f"{layout.root} has not trained a step yet", mend="continue it with `milesbatch run`")
    trainer = open_run(layout, len(incarnations)).recipe.trainer
    with tempfile.TemporaryDirectory() as place:
        arguments = [str(layout.root), str(step), "{rank}", str(trainer.ranks), str(Path(place) / "store")]
        code, out, said = run_ranks("milesbatch.trainer.replay", arguments, trainer.ranks, trainer.threads)
    if code == InputError.exit_code:
        raise InputError(said.rpartition("error: ")[2].strip())
    if code:
        raise RunFailedError(
            f"the replay ended with exit status {code}: {said.rpartition('error: ')[2].strip()[-2000:]}"
        )
    rows = [_compared(layout, json.loads(line)) for line in out.splitlines()]
    if as_json:
        print(json.dumps({"ok": all(row["ok"] for row in rows), "steps": rows}, indent=1))
    else:
        Console().print(_table(rows))
    if not all(row["ok"] for row in rows):
        raise typer.Exit(EXIT_NOT_WELL)


def _compared(layout: RunLayout, row: dict[str, Any]) -> dict[str, Any]:
    manifest = read_manifest(layout, row["step"])
    event = step_events(layout).get(row["step"])
    recorded_loss = None if event is None else event["metrics"]["loss"]
    recorded_digest = None if manifest is None else manifest.weights_digest
    is_same_loss = recorded_loss is None or abs(recorded_loss - row["loss"]) < 1e-6
    return {
        **row,
        "recorded_loss": recorded_loss,
        "recorded_digest": recorded_digest,
        "digest_equal": recorded_digest == row["weights_digest"],
        "ok": is_same_loss and recorded_digest in (None, row["weights_digest"]),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("step", "loss", "recorded loss", "weights digest", "equal")
    for row in rows:
        loss = "" if row["recorded_loss"] is None else f"{row['recorded_loss']:+.7f}"
        equal = "yes" if row["ok"] else f"NO: recorded {row['recorded_digest']}"
        table.add_row(str(row["step"]), f"{row['loss']:+.7f}", loss, row["weights_digest"], equal)
    return table
