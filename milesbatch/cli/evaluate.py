"""``milesbatch evaluate``: ask policy versions held-out prompts, beside the training or long after it.

Owns the words on the screen. Invariant: with ``--json`` standard output is one JSON document and nothing else;
``--list`` needs no torch. The page behind it is ``docs/evaluation.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, MilesbatchError, UsageError
from milesbatch.evaluation.reader import Curve, curves, read_evaluations
from milesbatch.recipe.sglang import server_addresses
from milesbatch.records import EvaluationRecord
from milesbatch.store.layout import RunLayout


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")],
    version: Annotated[
        list[int] | None, typer.Option("--version", min=0, help="Policy version; may be given again.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", min=1, help="Every so many steps, the first and the last; else as in the recipe."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for versions to come, until the run is finished.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Other held-out prompts (.jsonl, .parquet, .arrow)."),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Samples of each prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0: always the likeliest token.")
    ] = None,
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="With SGLang: a server that runs already, for this evaluation alone, instead of starting one; may be given"
            " again.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="Holds the key that the servers of --url want; instead of the recipe's rollout.sglang.key_file.",
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Evaluate nothing; show what there is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Ask policy versions held-out prompts, and keep the answers in the run; training is not touched.

    What was evaluated before is not evaluated again. Exit code 1 when a version could not be evaluated.
    """
    layout = find_run(run)
    if version and every:
        raise UsageError("--version and --every say different things", mend="give one of the two")
    if key_file is not None and not urls:
        raise UsageError(
            f"--key-file {key_file} is for servers that run already, and none is named: one that is started here has a key"
            " of its own",
            mend="name them with --url, or leave --key-file out",
        )
    skipped: dict[int, str] = {}
    chosen: list[EvaluationRecord] | None = None
    if not only_list:
        from milesbatch.evaluation.by_hand import Wish, evaluate_by_hand
        from milesbatch.report.status import is_finished

        wish = Wish(
            versions=tuple(sorted(set(version or ()))),
            every=every,
            prompts=prompts,
            samples=samples,
            temperature=temperature,
            follow=follow,
            urls=_checked(urls or ()),
            key_file=None if key_file is None else key_file.absolute(),
        )
        outcome = evaluate_by_hand(layout, wish, lambda steps: is_finished(layout, steps), _say)
        chosen, skipped = outcome.records, outcome.skipped
    _show(layout, chosen, skipped, as_json)


def _checked(urls: Sequence[str]) -> tuple[str, ...]:
    try:
        return server_addresses(tuple(urls))
    except ValueError as error:
        raise UsageError(f"--url: {error}", mend="give the address of each server once") from error


def _show(layout: RunLayout, chosen: Sequence[EvaluationRecord] | None, skipped: dict[int, str], as_json: bool) -> None:
    """``chosen`` alone; with None all there are."""
    errors: Sequence[MilesbatchError] = ()
    if chosen is None:
        chosen, errors = read_evaluations(layout)
    found = curves(chosen)
    if as_json:
        json.dump(_document(layout, found, skipped), sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
    else:
        _print(found)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if errors or skipped:
        raise typer.Exit(EXIT_NOT_WELL)


def _document(layout: RunLayout, found: Sequence[Curve], skipped: dict[int, str]) -> dict[str, Any]:
    return {
        "curves": [
            {
                "name": curve.name,
                "settings": curve.points[-1].settings.model_dump(mode="json"),
                "best_version": curve.best.version,
                "points": [_point(layout, record) for record in curve.points],
            }
            for curve in found
        ],
        "skipped": [{"version": version, "reason": reason} for version, reason in sorted(skipped.items())],
    }


def _point(layout: RunLayout, record: EvaluationRecord) -> dict[str, Any]:
    directory = layout.evaluation(record.version)
    return {
        "version": record.version,
        "weights_digest": record.weights_digest,
        **record.figures.model_dump(mode="json"),
        "seconds": record.seconds,
        "started_at": record.started_at,
        "path": str(layout.evaluation_record(record.version, record.tag)),
        "trajectories": [str(directory / ref.path) for ref in record.files],
    }


def _print(found: Sequence[Curve]) -> None:
    console = Console()
    if not found:
        console.print("no policy version has been evaluated")
    for curve in found:
        settings = curve.points[-1].settings
        how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
        title = f"{curve.name}: {settings.num_prompts} prompts, {settings.samples_per_prompt} samples each, {how}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for heading in ("version", "reward", "std", "parts", "length", "cut off", "failed", "seconds"):
            table.add_column(heading, justify="left" if heading == "parts" else "right")
        for record in curve.points:
            table.add_row(*_cells(record, is_best=record is curve.best))
        console.print(table)


def _cells(record: EvaluationRecord, *, is_best: bool) -> list[str]:
    figures = record.figures
    cut = figures.finish_reasons.get("length", 0)
    return [
        str(record.version),
        ("-" if figures.reward_mean is None else f"{figures.reward_mean:.3f}") + (" *" if is_best else "  "),
        "-" if figures.reward_std is None else f"{figures.reward_std:.3f}",
        ", ".join(f"{name} {value:.3g}" for name, value in figures.rewards.items()),
        f"{figures.length_mean:.1f}",
        str(cut),
        str(figures.failed),
        f"{record.seconds:.2f}",
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
