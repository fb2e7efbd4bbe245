"""``milesbatch weights``: list, check and write out the policy versions of a run.

Owns the words on the screen; never reads payload itself. Invariant: with ``--json`` standard output is one JSON document and
nothing else. Imports without torch. The page behind it is ``docs/format-weights.md``.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from milesbatch.cli import weights_exchange, weights_mirror, weights_stage, weights_stats
from milesbatch.cli.documents import print_json
from milesbatch.cli.names_in_files import in_files
from milesbatch.cli.outputs import check_outputs
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, UsageError
from milesbatch.weights.listing import Violation, WeightsRow, rows, verify
from milesbatch.weights.materialize import materialize as write_version
from milesbatch.weights.reader import committed_versions, is_retired, require_version

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Policy versions of a run: list, check, look at changes, write out, exchange with other tools, register.",
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@app.command("ls", epilog="Example: milesbatch weights ls runs/tiny")
def ls(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the committed policy versions with their sizes and the share of elements that changed.

    Exit code 1 when a manifest cannot be read; the others are listed.
    """
    damaged: list[Violation] = []
    found = rows(find_run(run), damaged)
    if as_json:
        print_json([dataclasses.asdict(row) for row in found])
    else:
        Console().print(_table(found))
    for violation in damaged:
        print(f"not listed: {violation.path} ({violation.detail})", file=sys.stderr)
    if damaged:
        raise typer.Exit(EXIT_NOT_WELL)


@app.command("verify", epilog="Example: milesbatch weights verify runs/tiny")
def verify_run(run: RunArgument, as_json: JsonOption = False) -> None:
    """Check every file's digest, that each chain of deltas gives each recorded weights digest, and that no version is missing.

    Exit code 1 when something is not as it should be.
    """
    layout = find_run(run)
    violations = list(verify(layout))
    committed = committed_versions(layout)
    retired = sum(is_retired(layout, version) for version in committed)
    versions = len(committed) - retired
    if as_json:
        body = [dataclasses.asdict(violation) for violation in violations]
        print_json({"ok": not violations, "versions": versions, "retired": retired, "violations": body})
    else:
        _print_verdict(versions, retired, violations)
    if violations:
        raise typer.Exit(EXIT_NOT_WELL)


@app.command("materialize", epilog="Example: milesbatch weights materialize runs/tiny --version 20 -o tiny-20")
def materialize(
    run: RunArgument,
    version: Annotated[int, typer.Option("--version", min=0, help="Policy version, as `weights ls` shows it.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New or empty directory to write.")],
    as_json: JsonOption = False,
) -> None:
    """Write one policy version as a Hugging Face model directory, checked tensor by tensor."""
    check_outputs(output)
    layout = find_run(run)
    manifest = write_version(layout, version, output, in_files=in_files(layout))
    if as_json:
        print_json({"version": version, "digest": manifest.weights_digest, "path": str(output)})
        return
    console = Console()
    console.print(
        f"policy version {version} ({manifest.weights_digest}) written to {output}", soft_wrap=True, markup=False
    )
    console.print(f"load it with: AutoModelForCausalLM.from_pretrained({str(output)!r})", soft_wrap=True, markup=False)


@app.command("register", epilog="Example: milesbatch weights register runs/tiny --version 20 --name tiny-sums")
def register(
    run: RunArgument,
    version: Annotated[int, typer.Option("--version", min=0, help="Policy version, as `weights ls` shows it.")],
    name: Annotated[str, typer.Option("--name", help="Registered model; made when there is none of that name.")],
    as_json: JsonOption = False,
) -> None:
    """Put one policy version into MLflow's model registry, as a Hugging Face directory, with its weights digest as a tag."""
    from milesbatch.tracking.attach import MlflowRun  # imports MLflow

    if not name or set(name) & set("/:%\"'"):
        raise UsageError(
            f"{name!r} cannot name a registered model", mend="use letters, digits, dots, underscores, hyphens"
        )
    layout = find_run(run)
    require_version(layout, version)
    tracked = MlflowRun(layout)
    with tempfile.TemporaryDirectory(prefix="milesbatch-") as scratch:
        directory = Path(scratch) / "model"
        manifest = write_version(layout, version, directory, in_files=in_files(layout))
        registered = tracked.register_model(directory, name, version, manifest.weights_digest)
    if as_json:
        print_json({"name": name, "registered": registered, "version": version, "digest": manifest.weights_digest})
        return
    text = (
        f"policy version {version} ({manifest.weights_digest}) is version {registered} of the registered model {name}"
    )
    Console().print(text, soft_wrap=True, markup=False)


app.command("stats", epilog="Example: milesbatch weights stats runs/tiny")(weights_stats.stats)
app.command("stage", epilog="Example: milesbatch weights stage runs/tiny -o /dev/shm/tiny --follow")(
    weights_stage.stage
)
app.command("export", epilog="Example: milesbatch weights export runs/tiny -o tiny-weights --follow")(
    weights_exchange.export
)
app.command("import", epilog="Example: milesbatch weights import tiny-weights --version 20 -o tiny-20")(
    weights_exchange.import_version
)
app.command("push", epilog="Example: milesbatch weights push runs/tiny s3://bucket/tiny --follow")(weights_mirror.push)
app.command("pull", epilog="Example: milesbatch weights pull s3://bucket/tiny tiny-weights")(weights_mirror.pull)


def _table(found: list[WeightsRow]) -> Table:
    kept = [row for row in found if not row.retired]
    words = "policy versions" if len(kept) == len(found) else f"policy versions, {len(kept)} of them kept"
    table = Table(title=f"{len(found)} {words}, {sum(row.bytes for row in kept):,} bytes")
    for heading in ("version", "kind", "bytes", "delta by encoding", "changed", "inc.", "digest"):
        is_text = heading in ("kind", "delta by encoding", "digest")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in found:
        share = f"{row.changed / row.elements:.2%}" if row.elements else "-"
        digest = row.digest.removeprefix("xxh128:")[:12]
        kind, size = (f"{row.kind} (retired)", "-") if row.retired else (row.kind, f"{row.bytes:,}")
        table.add_row(str(row.version), kind, size, _by_encoding(row), share, str(row.incarnation), digest)
    return table


def _by_encoding(row: WeightsRow) -> str:
    """Of its delta: one line for each, the largest first."""
    found = row.bytes_by_encoding
    if found is None:
        return "-" if row.retired else "not known"
    return "\n".join(f"{name} {size:,}" for name, size in found.items() if name not in ("keyframe", "headers"))


def _print_verdict(versions: int, retired: int, violations: list[Violation]) -> None:
    console = Console()
    if not violations:
        more = f" ({retired} more were retired)" if retired else ""
        console.print(
            f"{versions} policy versions verified: every file and every chain is as recorded{more}", markup=False
        )
        return
    table = Table(title=f"{len(violations)} violations in {versions} policy versions")
    for heading in ("kind", "path", "detail"):
        table.add_column(heading, overflow="fold")
    for violation in violations:
        table.add_row(violation.kind, violation.path, violation.detail)
    console.print(table)
