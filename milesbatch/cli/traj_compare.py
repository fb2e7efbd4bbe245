"""``milesbatch traj diff`` and ``rescore``: two runs or steps on the same prompts; rewards now and then.

Owns the words on the screen. Invariant: texts of models reach the terminal without control sequences. The page behind
it is ``docs/trajectories.md``.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import takewhile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.analysis.compare import Change, Comparison, Side, compare
from milesbatch.analysis.listing import read_samples
from milesbatch.analysis.rescore import Difference, Rescored, rescore
from milesbatch.cli.conversation import visible
from milesbatch.cli.traj_run import JsonOption, RunArgument, VerifyOption, end, print_json, scan_of
from milesbatch.errors import EXIT_NOT_WELL, InputError, UsageError
from milesbatch.trajectories.trajectory import Trajectory

DIFF_EXAMPLE = "Example: milesbatch traj diff runs/a runs/b; milesbatch traj diff runs/a --steps 3,40"
RESCORE_EXAMPLE = "Example: milesbatch traj rescore runs/tiny --sample 500"
_LONGEST_TEXT = 2000


def diff(
    run: RunArgument,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="The run to compare with.")] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="Train steps to compare: 3,40 (or one, of both).")
    ] = None,
    most: Annotated[int, typer.Option("--most", min=0, help="Most changed prompts to show.")] = 5,
    as_json: JsonOption = False,
    verify: VerifyOption = False,
) -> None:
    """Compare two runs, or two steps of one, on the same prompts: rewards, lengths, texts; and say when tokens are
    equal."""
    pair = (None, None) if steps is None else _two_steps(steps)
    if other is None and pair[0] == pair[1]:
        raise UsageError("nothing to compare: give a second run, or two steps", mend=DIFF_EXAMPLE)
    first = scan_of(run, verify)
    second = first if other is None else scan_of(other, verify)
    sides = (Side(_label(run, pair[0]), first, pair[0]), Side(_label(other or run, pair[1]), second, pair[1]))
    for side in sides:
        if side.step is not None and not (side.scan.counted.step == side.step).any():
            raise InputError(
                f"{side.label}: no trajectory counts for that step",
                mend=f"its last step is {side.scan.counted.last_step}",
            )
    result = compare(*sides, most=most)
    texts = [
        [one for one, _ in read_samples(side.scan.counted, [change.shown[n] for change in result.changes])]
        for n, side in enumerate(sides)
    ]
    pairs = list(zip(result.changes, *texts, strict=True))
    if as_json:
        print_json(_diff_document(result, pairs))
    else:
        _print_diff(Console(), result, pairs)
    end(list(dict.fromkeys([*first.errors, *second.errors])))


def rescore_command(
    run: RunArgument,
    sample: Annotated[int, typer.Option("--sample", min=1, help="About this many trajectories, whole groups.")] = 200,
    every: Annotated[bool, typer.Option("--all", help="All trajectories.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which ones are drawn.")] = 0,
    reward: Annotated[str | None, typer.Option("--reward", help="Another function: package.module:name.")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="Rewards this close are equal.")] = 0.0,
    most: Annotated[int, typer.Option("--most", min=0, help="Most differing samples to show.")] = 10,
    as_json: JsonOption = False,
    verify: VerifyOption = False,
) -> None:
    """Call the recipe's reward function again for recorded trajectories; exits with 1 when a reward differs."""
    scan = scan_of(run, verify)
    shown = sys.stderr.isatty() and not as_json

    def progress(count: int) -> None:
        if shown:
            print(f"\r{count:,} judged", end="", file=sys.stderr, flush=True)

    result = rescore(
        scan,
        sample=None if every else sample,
        seed=seed,
        reward=reward,
        tolerance=tolerance,
        most=most,
        progress=progress,
    )
    if shown:
        print(file=sys.stderr)
    if as_json:
        print_json(_rescore_document(result))
    else:
        _print_rescored(Console(), result, seed)
    end(scan.errors)
    if result.differing:
        raise typer.Exit(EXIT_NOT_WELL)


def _two_steps(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) not in (1, 2) or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise UsageError(f"--steps is {text!r}", mend="write two train steps, as in --steps 3,40")
    return int(parts[0]), int(parts[-1])


def _label(run: str, step: int | None) -> str:
    return run if step is None else f"{run}, step {step}"


# -- diff -------------------------------------------------------------------------------------------------------------


def _diff_document(result: Comparison, pairs: list[tuple[Change, Trajectory, Trajectory]]) -> dict[str, Any]:
    document = dataclasses.asdict(result)
    document["equal"] = result.are_equal
    document["changes"] = [
        {**dataclasses.asdict(change), "texts": [_response(first), _response(second)]}
        for change, first, second in pairs
    ]
    return document


def _print_diff(console: Console, result: Comparison, pairs: list[tuple[Change, Trajectory, Trajectory]]) -> None:
    table = Table(show_edge=False)
    table.add_column("")
    for side in result.sides:
        table.add_column(Text(side.label), justify="right", overflow="fold")
    first, second = result.sides
    rows: list[tuple[str, Any, Any]] = [
        ("samples", first.samples, second.samples),
        ("failed episodes", first.failed, second.failed),
        ("prompts", first.prompts, second.prompts),
        ("only here", *result.only),
        ("mean reward", first.reward_mean, second.reward_mean),
        ("mean response tokens", first.length_mean, second.length_mean),
        ("mean reward, common prompts", *result.reward_mean),
        ("mean response tokens, common prompts", *result.length_mean),
    ]
    for label, *values in rows:
        table.add_row(label, *("-" if v is None else f"{v:.4f}" if isinstance(v, float) else f"{v:,}" for v in values))
    console.print(table)
    console.print(Text(_verdict(result)))
    for change, before, after in pairs:
        console.print(_side_by_side(change, before, after))


def _verdict(result: Comparison) -> str:
    if not result.common_prompts:
        return "no prompt is on both sides, neither by id nor by its tokens: nothing can be compared but the means"
    if result.are_equal:
        return f"tokens are equal in all {result.matched_samples:,} samples"
    by = "" if result.matched_by == "prompt_id" else " (no id is on both sides: matched by the tokens of the prompts)"
    if result.equal_samples == result.matched_samples and not result.better + result.worse:
        number = result.matched_samples
        return f"{result.common_prompts:,} common prompts{by}: tokens are equal in all {number:,} matched samples"
    return (
        f"{result.common_prompts:,} common prompts{by}: reward better in {result.better:,}, worse in {result.worse:,}, "
        f"the same in {result.unchanged:,}; tokens are equal in {result.equal_samples:,} of {result.matched_samples:,}"
        " matched samples"
    )


def _side_by_side(change: Change, before: Trajectory, after: Trajectory) -> Table:
    table = Table(
        title=Text(f"prompt {visible(change.prompt_id)}: {_question(after)}"), title_justify="left", expand=True
    )
    for n, sample in enumerate((before, after)):
        means = f"reward {change.reward[n]:.3f}, {change.length[n]:.1f} tokens ({change.samples[n]} samples)"
        head = f"group {sample.group_id}, sample {sample.sample_index}: reward {change.shown_rewards[n]:g}"
        table.add_column(Text(f"mean {means}\n{head}"), ratio=1, overflow="fold")
    texts = [_response(before), _response(after)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    table.add_row(*(_marked(text, same) for text in texts))
    return table


def _marked(text: str, same: int) -> Text:
    """The text, what differs from the other side in bold."""
    shown = Text(visible(text[:same]), style="dim")
    shown.append(visible(text[same:_LONGEST_TEXT]), style="not dim bold")
    if len(text) > _LONGEST_TEXT:
        shown.append(f" ... ({len(text):,} characters)", style="not bold dim")
    return shown


def _question(sample: Trajectory) -> str:
    asked = [message.content for message in sample.messages[:-1] if message.role == "user"]
    text = visible(asked[-1] if asked else "").replace("\n", " ")
    return text if len(text) <= 100 else f"{text[:97]}..."


def _response(sample: Trajectory) -> str:
    return sample.messages[-1].content if sample.messages else ""


# -- rescore ----------------------------------------------------------------------------------------------------------


def _rescore_document(result: Rescored) -> dict[str, Any]:
    document = dataclasses.asdict(result)
    count = result.compared
    document["recorded_mean"] = document.pop("recorded_sum") / count if count else None
    document["now_mean"] = document.pop("now_sum") / count if count else None
    return document


def _print_rescored(console: Console, result: Rescored, seed: int) -> None:
    changed = {True: "its source has changed since the run began", False: "its source is that of the run", None: ""}
    note = changed[result.is_changed]
    console.print(Text(f"{result.reward}{f' ({note})' if note else ''}; prompts: {result.prompts}"))
    which = "all" if result.drawn == result.groups else f"drawn with seed {seed}; --all judges all of them"
    judged = result.compared + result.skipped
    console.print(Text(f"{result.drawn:,} of {result.groups:,} groups ({which}), with {judged:,} samples"))
    skipped = f"; {result.skipped:,} episodes that failed before were left out" if result.skipped else ""
    console.print(Text(f"{result.differing:,} of {result.compared:,} differ{skipped}"))
    if result.compared:
        means = (result.recorded_sum / result.compared, result.now_sum / result.compared)
        console.print(Text("mean reward: recorded {:.6g}, now {:.6g}".format(*means)))
    if result.differences:
        console.print(_difference_table(result.differences))


def _difference_table(differences: list[Difference]) -> Table:
    table = Table(title="most different")
    for heading in ("step", "group", "sample", "recorded", "now", "parts", "response"):
        table.add_column(heading, justify="left" if heading in ("parts", "response") else "right", overflow="fold")
    for one in differences:
        table.add_row(
            "-" if one.step is None else str(one.step),
            str(one.group_id),
            str(one.sample_index),
            _reward(one.recorded, one.recorded_error),
            _reward(one.now, one.error),
            Text(visible(_parts(one))),
            Text(visible(one.response[:200])),
        )
    return table


def _reward(value: float | None, error: str | None) -> Text:
    return Text(f"{value:g}") if value is not None else Text(f"failed: {visible(error or '')}", style="red")


def _parts(one: Difference) -> str:
    names = sorted({*one.recorded_parts, *one.parts})
    return ", ".join(f"{n} {one.recorded_parts.get(n, '-')} -> {one.parts.get(n, '-')}" for n in names)
