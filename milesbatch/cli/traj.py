"""``milesbatch traj``: list trajectory files, read a group as conversations, statistics by step.

Owns the words on the screen. Invariants: with ``--json`` standard output is one JSON document and nothing else; a
damaged file is reported on standard error and the rest is shown. Imports without torch. The page behind it is
``docs/format-trajectories.md``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.cli.conversation import Colour, legend, print_sample, token_text
from milesbatch.cli.runs import find_run
from milesbatch.errors import EXIT_NOT_WELL, InputError, MilesbatchError, ModelError
from milesbatch.trajectories.listing import FileRow, Located, find_group, list_files, read_batches
from milesbatch.trajectories.statistics import StepStatistics, step_statistics
from milesbatch.trajectories.trajectory import Trajectory

app = typer.Typer(
    no_args_is_help=True,
    help="Trajectories of a run: list the files, read a group as conversations, statistics by step.",
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under $MILESBATCH_RUNS.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
_LONGEST_LIST = 8


@app.command("ls", epilog="Example: milesbatch traj ls runs/tiny")
def ls(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the trajectory files: groups, samples, size, who wrote them under which policy versions."""
    rows, errors = list_files(find_run(run))
    if as_json:
        _print_json([dataclasses.asdict(row) for row in rows])
    else:
        Console().print(_file_table(rows))
    _end(errors)


@app.command("show", epilog="Example: milesbatch traj show runs/tiny 12 --sample 0 --colour version")
def show(
    run: RunArgument,
    group: Annotated[int, typer.Argument(metavar="GROUP", min=0, help="Prompt group, as `traj ls` shows it.")],
    sample: Annotated[int | None, typer.Option("--sample", min=0, help="Only this sample of the group.")] = None,
    colour: Annotated[Colour, typer.Option("--colour", "--color", help="What token colours say.")] = Colour.LOGPROB,
    as_json: JsonOption = False,
) -> None:
    """Read one group: each sample as a conversation, its tokens, rewards, policy versions, and the group's fate."""
    layout = find_run(run)
    records, errors = read_batches(layout)
    located, damaged = find_group(layout, group, records)
    trajectories = [t for t in located.trajectories if sample in (None, t.sample_index)]
    if not trajectories:
        raise InputError(
            f"group {group} has no sample {sample}", mend=f"its samples are 0 .. {len(located.trajectories) - 1}"
        )
    if as_json:
        _print_json(_group_document(located, trajectories))
    else:
        console, spell = Console(), None
        try:
            spell = token_text(layout.model)
        except ModelError as error:
            damaged.append(error)
        console.print(Text(f"group {group}: {located.fate or 'pending'}, in {located.path}"), soft_wrap=True)
        for path in located.others:
            console.print(Text(f"may also be in {path}, which does not count"), soft_wrap=True)
        console.print(legend(colour))
        for trajectory in trajectories:
            print_sample(console, trajectory, spell, colour)
    _end([*errors, *damaged])


@app.command("stats", epilog="Example: milesbatch traj stats runs/tiny --json")
def stats(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show rewards, lengths and staleness by train step, and how many groups were trained, rejected or failed."""
    layout = find_run(run)
    records, errors = read_batches(layout)
    steps, damaged = step_statistics(layout, records)
    if as_json:
        _print_json([dataclasses.asdict(step) for step in steps])
    else:
        Console().print(_step_table(steps))
    _end([*errors, *damaged])


def _end(errors: Sequence[MilesbatchError]) -> None:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if errors:
        raise typer.Exit(EXIT_NOT_WELL)


def _file_table(rows: Sequence[FileRow]) -> Table:
    samples, size = sum(row.trajectories for row in rows), sum(row.bytes for row in rows)
    table = Table(title=f"{len(rows)} files, {samples:,} trajectories, {size:,} bytes")
    for heading in ("groups", "samples", "failed", "bytes", "worker", "incarnation", "versions", "file"):
        left = heading in ("worker", "file")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(
            _brief(row.group_ids),
            str(row.trajectories),
            str(row.failed),
            f"{row.bytes:,}",
            row.worker,
            str(row.incarnation),
            _brief(row.versions),
            Text(row.path.rpartition("/")[2]),
        )
    return table


def _step_table(steps: Sequence[StepStatistics]) -> Table:
    table = Table(title=f"{len(steps)} train steps")
    for heading in ("step", "reward", "std", "length", "staleness", "trained", "rejected", "failed"):
        table.add_column(heading, justify="right")
    for step in steps:
        numbers = (step.reward_mean, step.reward_std, step.length_mean, step.staleness_mean)
        counts = (step.trained, step.rejected, step.failed)
        shown = ["-" if number is None else f"{number:.3f}" for number in numbers]
        table.add_row(str(step.step), *shown, *(str(count) for count in counts))
    return table


def _brief(numbers: Sequence[int]) -> str:
    """``0-3`` for a gapless run of numbers, else the numbers themselves, the tail cut off."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    text = ", ".join(str(number) for number in numbers[:_LONGEST_LIST])
    return text if len(numbers) <= _LONGEST_LIST else f"{text}, ..."


def _group_document(located: Located, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    fate = located.fate
    return {
        "group_id": located.group_id,
        "fate": str(fate or "pending"),
        "step": fate.step if fate else None,
        "path": str(located.path),
        "others": [str(path) for path in located.others],
        "samples": [_sample_document(trajectory) for trajectory in trajectories],
    }


def _sample_document(trajectory: Trajectory) -> dict[str, Any]:
    document = dataclasses.asdict(trajectory)
    experts = trajectory.routed_experts
    document["routed_experts"] = None if experts is None else [entry.hex() for entry in experts]
    document["started"], document["ended"] = trajectory.started.isoformat(), trajectory.ended.isoformat()
    return document


def _print_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
