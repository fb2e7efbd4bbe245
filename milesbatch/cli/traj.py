"""``milesbatch traj``: list trajectory files, read samples as conversations, statistics; and the commands of its
siblings.

Owns the words on the screen. Invariants: with ``--json`` standard output is one JSON document and nothing else; a
damaged file is reported on standard error and the rest is shown. Imports without torch. The page behind it is
``docs/trajectories.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from milesbatch.analysis.choose import Choice, choose_samples
from milesbatch.analysis.evaluated import EvaluationLayout
from milesbatch.analysis.listing import find_group, list_files, read_samples
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.analysis.statistics import run_statistics
from milesbatch.cli import traj_compare, traj_export, traj_query
from milesbatch.cli.conversation import Colour, TokenText, legend, print_sample, token_text
from milesbatch.cli.traj_run import EvaluationOption, JsonOption, RunArgument, VerifyOption, end, print_json, scan_of
from milesbatch.cli.traj_words import file_table, overall_document, print_overall, step_table
from milesbatch.decisions.fates import Fate
from milesbatch.errors import InputError, MilesbatchError, ModelError, UsageError
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.trajectory import Trajectory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Trajectories of a run: list files, read samples, statistics, SQL, compare, export, score again.",
)
AllOption = Annotated[bool, typer.Option("--all", help="All rows on the terminal, however many.")]
StepOption = Annotated[int | None, typer.Option("--step", min=1, help="Choose samples of this train step.")]


def _number(name: str, what: str) -> Any:
    return typer.Option(name, min=1, help=f"Choose this many samples {what}.")


@app.command("ls", epilog="Example: milesbatch traj ls runs/tiny")
def ls(
    run: RunArgument, as_json: JsonOption = False, show_all: AllOption = False, verify: VerifyOption = False
) -> None:
    """List the trajectory files: groups and their fates, samples, size, who wrote them under which policy versions."""
    counted = scan_of(run).counted
    rows, errors = list_files(counted, verify=verify)
    if as_json:
        print_json([_document(row) for row in rows])
    else:
        Console().print(file_table(rows, show_all=show_all))
    end(errors)


@app.command("show", epilog="Example: milesbatch traj show runs/tiny --step 12 --best 2 --worst 2 --colour version")
def show(
    run: RunArgument,
    group: Annotated[int | None, typer.Argument(metavar="[GROUP]", min=0, help="Group, as `traj ls` shows it.")] = None,
    sample: Annotated[int | None, typer.Option("--sample", min=0, help="Only this sample of the group.")] = None,
    step: StepOption = None,
    best: Annotated[int | None, _number("--best", "with the highest reward")] = None,
    worst: Annotated[int | None, _number("--worst", "with the lowest reward")] = None,
    median: Annotated[int | None, _number("--median", "with a reward in the middle")] = None,
    odd: Annotated[int | None, _number("--odd", "that stand out: failed, longest, shortest, cut off")] = None,
    colour: Annotated[Colour, typer.Option("--colour", "--color", help="What token colours say.")] = Colour.LOGPROB,
    evaluation: EvaluationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read samples as conversations: a group, or those chosen by reward; tokens, rewards, policy versions, fate."""
    scan = scan_of(run, evaluation=evaluation)
    numbers = {"best": best or 0, "worst": worst or 0, "median": median or 0, "odd": odd or 0}
    wants_choice = step is not None or any(numbers.values())
    if (group is None) != wants_choice or (wants_choice and sample is not None):
        raise UsageError(
            "which samples? Either a GROUP (with or without --sample), or --step, --best, --worst, --median, --odd",
            mend="for example `milesbatch traj show RUN 12`, or `milesbatch traj show RUN --step 12 --worst 3`",
        )
    if group is not None:
        _show_group(scan, group, sample, colour, as_json)
    else:
        _show_chosen(scan, step, numbers if any(numbers.values()) else {"best": 1, "worst": 1}, colour, as_json)


def _show_group(scan: TrajectoryScan, group: int, sample: int | None, colour: Colour, as_json: bool) -> None:
    layout, located = scan.counted.layout, find_group(scan.counted, group)
    trajectories = [t for t in located.trajectories if sample in (None, t.sample_index)]
    if not trajectories:
        raise InputError(
            f"group {group} has no sample {sample}", mend=f"its samples are 0 .. {len(located.trajectories) - 1}"
        )
    errors = list(scan.errors)
    if as_json:
        document = {
            **_fate_document(located.group_id, located.fate),
            "path": str(located.path),
            "others": [str(path) for path in located.others],
            "samples": [_sample_document(trajectory) for trajectory in trajectories],
        }
        print_json(document)
    else:
        console, spell = Console(), _spelling(layout, errors)
        console.print(Text(f"group {group}: {_fate_word(layout, located.fate)}, in {located.path}"), soft_wrap=True)
        for path in located.others:
            console.print(Text(f"may also be in {path}, which does not count"), soft_wrap=True)
        console.print(legend(colour))
        for trajectory in trajectories:
            print_sample(console, trajectory, spell, colour, fate=located.fate)
    end(errors)


def _show_chosen(
    scan: TrajectoryScan, step: int | None, numbers: dict[str, int], colour: Colour, as_json: bool
) -> None:
    if step is not None and not (scan.counted.step == step).any():
        raise InputError(
            f"no trajectory counts for step {step}", mend=f"the last recorded step is {scan.counted.last_step}"
        )
    choices = choose_samples(scan, step=step, **numbers)
    found = read_samples(scan.counted, [(choice.group_id, choice.sample_index) for choice in choices])
    errors = list(scan.errors)
    if as_json:
        print_json([_choice_document(choice, *one) for choice, one in zip(choices, found, strict=True)])
    else:
        console, spell = Console(), _spelling(scan.counted.layout, errors)
        console.print(legend(colour))
        for choice, (trajectory, fate) in zip(choices, found, strict=True):
            print_sample(console, trajectory, spell, colour, fate=fate, note=f"{choice.kind}: {choice.why}")
    end(errors)


@app.command("stats", epilog="Example: milesbatch traj stats runs/tiny --json")
def stats(
    run: RunArgument,
    as_json: JsonOption = False,
    overall: Annotated[bool, typer.Option("--overall", help="Only the whole run, not its steps.")] = False,
    show_all: AllOption = False,
    evaluation: EvaluationOption = None,
    verify: VerifyOption = False,
) -> None:
    """Show rewards, lengths, ends, failures, staleness and speed, of the whole run and by train step."""
    scan = scan_of(run, verify, evaluation)
    overall = overall or evaluation is not None  # no step trains on an evaluation
    steps, whole = run_statistics(scan)
    if as_json:
        print_json(overall_document(whole) if overall else [_document(step) for step in steps])
    else:
        console = Console()
        print_overall(console, whole)
        if not overall:
            console.print(step_table(steps, show_all=show_all))
    end(scan.errors)


def _spelling(layout: RunLayout, errors: list[MilesbatchError]) -> TokenText | None:
    try:
        return token_text(layout.model)
    except ModelError as error:
        errors.append(error)
        return None


def _document(row: Any) -> dict[str, Any]:
    """A flat value as JSON; not ``asdict``, which copies what it holds, slowly."""
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def _fate_word(layout: RunLayout, fate: Fate | None) -> str:
    if isinstance(layout, EvaluationLayout):
        return f"evaluation of policy version {layout.version}"
    return str(fate or "pending")


def _fate_document(group: int, fate: Fate | None) -> dict[str, Any]:
    return {"group_id": group, "fate": str(fate or "pending"), "step": fate.step if fate else None}


def _choice_document(choice: Choice, trajectory: Trajectory, fate: Fate | None) -> dict[str, Any]:
    why = {"kind": choice.kind, "why": choice.why}
    return {**_fate_document(choice.group_id, fate), **why, "sample": _sample_document(trajectory)}


def _sample_document(trajectory: Trajectory) -> dict[str, Any]:
    document = dataclasses.asdict(trajectory)
    experts: Sequence[bytes] | None = trajectory.routed_experts
    document["routed_experts"] = None if experts is None else [entry.hex() for entry in experts]
    document["started"], document["ended"] = trajectory.started.isoformat(), trajectory.ended.isoformat()
    return document


app.command("sql", epilog=traj_query.SQL_EXAMPLE)(traj_query.sql)
app.command("find", epilog=traj_query.FIND_EXAMPLE)(traj_query.find)
app.command("diff", epilog=traj_compare.DIFF_EXAMPLE)(traj_compare.diff)
app.command("rescore", epilog=traj_compare.RESCORE_EXAMPLE)(traj_compare.rescore_command)
app.command("export", epilog="Example: milesbatch traj export runs/tiny -o tiny.parquet")(traj_export.export)
