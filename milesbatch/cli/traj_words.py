"""Trajectory files and statistics as tables and bars for a terminal. Pure but for printing.

Invariant: what is left out for want of room is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.analysis.jumps import find_jumps
from milesbatch.analysis.listing import FileRow
from milesbatch.analysis.statistics import Overall, StepStatistics
from milesbatch.analysis.tally import Tally
from milesbatch.cli.conversation import visible

_LONGEST_LIST = 8
_MOST_ROWS = 40
_FIRST_ROWS = 10
_MOST_JUMPS = 3
_MOST_CAUSES = 10
_BAR = 40
_QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


def file_table(rows: Sequence[FileRow], *, show_all: bool) -> Table:
    """Files, the last ones only unless ``show_all``."""
    samples, size = sum(row.trajectories for row in rows), sum(row.bytes for row in rows)
    fates = (sum(row.trained for row in rows), sum(row.rejected for row in rows), sum(row.pending for row in rows))
    left_out = 0 if show_all else max(0, len(rows) - _MOST_ROWS)
    table = Table(
        title=f"{len(rows)} files, {samples:,} trajectories, {size:,} bytes",
        caption="{} groups trained, {} rejected, {} pending".format(*fates) + _left_out(left_out, "earlier files"),
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("file", no_wrap=True)
    for heading in ("samples", "failed", "steps", "versions", "bytes"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("groups", overflow="fold")
    for row in rows[left_out:]:
        counts = {"trained": row.trained, "rejected": row.rejected, "pending": row.pending}
        fate = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        # The tag at the end of a name tells nobody anything.
        name = row.path.rpartition("/")[2].rpartition(".")[0].rpartition(".")[0]
        table.add_row(
            Text(name),
            str(row.trajectories),
            str(row.failed),
            _brief(row.steps),
            _brief(row.versions),
            f"{row.bytes:,}",
            Text(fate or f"do not count: {row.uncounted}", style="" if fate else "yellow"),
        )
    return table


def step_table(steps: Sequence[StepStatistics], *, show_all: bool) -> Table:
    """Statistics by step, without the middle ones of a long run unless ``show_all``, and where the reward changed most."""
    left_out = 0 if show_all else max(0, len(steps) - _MOST_ROWS)
    notes = [_left_out(left_out, "steps in between").removeprefix("; "), _jumps(steps)]
    table = Table(
        title=f"{len(steps)} train steps",
        caption="\n".join(note for note in notes if note) or None,
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for heading in ("step", "reward", "std", "length", "longest", "cut", "staleness", "trained", "rejected", "failed"):
        table.add_column(heading, justify="right")
    for place, step in enumerate(steps):
        if left_out and place == _FIRST_ROWS:
            table.add_row("...")
        if left_out and _FIRST_ROWS <= place < _FIRST_ROWS + left_out:
            continue
        cut = step.finish_reasons.get("length", 0) / step.samples if step.samples else None
        table.add_row(
            str(step.step),
            *(_figure(number) for number in (step.reward_mean, step.reward_std, step.length_mean)),
            "-" if step.length_max is None else str(step.length_max),
            "-" if cut is None else f"{cut:.0%}",
            _figure(step.staleness_mean),
            *(str(count) for count in (step.trained, step.rejected, step.failed)),
        )
    return table


def _jumps(steps: Sequence[StepStatistics]) -> str:
    """The largest changes of the mean reward, and whether they are more than its noise."""
    found = find_jumps([step.step for step in steps], [step.reward_mean for step in steps])
    if not found:
        return ""
    words = "; ".join(f"at step {jump.step}, {jump.before:.3f} to {jump.after:.3f}" for jump in found[:_MOST_JUMPS])
    per = "" if found[0].window == 1 else f" (means of {found[0].window} steps each)"
    sure = "" if found[0].is_clear else "; none is clearly more than noise"
    return f"largest changes of the reward: {words}{per}{sure}"


def print_overall(console: Console, whole: Overall) -> None:
    """The whole run: counts, histograms, ends, causes."""
    fates = ", ".join(f"{number:,} {fate}" for fate, number in whole.groups.items())
    console.print(Text(f"{whole.trajectories:,} trajectories in groups: {fates}; {whole.failed:,} episodes failed"))
    speed = "" if whole.tokens_per_s is None else f" in {whole.seconds:,.0f} s: {whole.tokens_per_s:,.0f} tokens/s"
    console.print(Text(f"{whole.response_tokens:,} response tokens{speed}"))
    for title, tally in (("reward", whole.reward), ("response tokens", whole.length), ("staleness", whole.staleness)):
        if tally.count:
            _print_histogram(console, title, tally)
    for title, words in (("finish reason", whole.finish_reasons), ("failed, by cause", whole.failed_by_cause)):
        if words:
            _print_bars(console, title, _shortened(words))


def overall_document(whole: Overall) -> dict[str, Any]:
    """The whole run as JSON: for each quantity its quantiles and a histogram."""
    document = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    for name in ("reward", "length", "staleness"):
        tally: Tally = document[name]
        mean = float((tally.values * tally.counts).sum() / tally.count) if tally.count else None
        document[name] = {
            "count": tally.count,
            "mean": mean,
            **{key: tally.quantile(share) for key, share in _QUANTILES.items()},
            "min": float(tally.values[0]) if tally.count else None,
            "max": float(tally.values[-1]) if tally.count else None,
            "histogram": [{"from": low, "to": high, "count": count} for low, high, count in tally.bins()],
        }
    return document


def _print_histogram(console: Console, title: str, tally: Tally) -> None:
    middle = ", ".join(f"{name} {tally.quantile(share):g}" for name, share in _QUANTILES.items())
    bins = [(f"{low:g}" if low == high else f"{low:.4g} to {high:.4g}", count) for low, high, count in tally.bins()]
    _print_bars(console, f"{title} ({middle})", bins)


def _print_bars(console: Console, title: str, rows: Sequence[tuple[str, int]]) -> None:
    most = max((count for _, count in rows), default=1)
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(justify="left", no_wrap=True)
    for label, count in rows:
        # At least a sliver for anything that is there.
        eighths = max(round(8 * _BAR * count / most), 1) if count else 0
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]
        table.add_row(Text(visible(label)), f"{count:,}", Text(bar.rstrip(), style="cyan"))
    console.print(Text(title, style="bold"), table, sep="\n")


def _shortened(words: Mapping[str, int]) -> list[tuple[str, int]]:
    rows = list(words.items())
    rest = sum(count for _, count in rows[_MOST_CAUSES:])
    return [*rows[:_MOST_CAUSES], *([(f"{len(rows) - _MOST_CAUSES} others", rest)] if rest else [])]


def _left_out(number: int, what: str) -> str:
    return f"; {number:,} {what} are not shown (--all)" if number else ""


def _figure(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def _brief(numbers: Sequence[int]) -> str:
    """``0-3`` for a gapless run of numbers, else the numbers themselves, the tail cut off."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    text = ", ".join(str(number) for number in numbers[:_LONGEST_LIST])
    return text if len(numbers) <= _LONGEST_LIST else f"{text}, ..."
