"""The sections about what the run made: lag of its tokens, failed episodes, weights, samples, the recipe. Pure.

Owns: words, tables, and the data of their charts. The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milesbatch.report.page.charts import bars, curve, shares
from milesbatch.report.page.experience import LAGS, Experience
from milesbatch.report.page.html import Html, joined, table, tag
from milesbatch.report.page.samples import Shown
from milesbatch.report.page.steps import rounded
from milesbatch.report.page.versions import VersionRow
from milesbatch.report.page.words import figure, many, share, size, span

_MOST_BINS = 240
_MOST_CAUSES = 25
_LONGEST_TEXT = 3000
_DOTS_BELOW = 60

Chart = dict[str, Any]


def lag_words(experience: Experience) -> Html:
    """Shares of tokens by lag, and groups that were never trained on."""
    sums = [sum(column) for column in zip(*experience.lag_tokens.values(), strict=True)]
    if not sums:
        return tag("p", "No trained tokens could be read.", _class="quiet")
    legend = [
        tag("li", tag("i", _class=f"swatch lag{lag}"), f"{lag_name(lag)}: {share(number, sum(sums))}")
        for lag, number in enumerate(sums)
        if number
    ]
    rejected = sorted((reason, number) for reason, number in experience.rejected.items() if number)
    words = ", ".join(f"{number:,} {reason.replace('_', ' ')}" for reason, number in rejected)
    return joined(
        [
            tag("ul", *legend, _class="legend", aria_label="share of trained tokens by lag"),
            tag("p", f"Groups rejected: {words or 'none'}.", _class="quiet"),
        ]
    )


def lag_name(lag: int) -> str:
    """In words."""
    if lag == 0:
        return "newest version"
    return f"{lag} or more behind" if lag == LAGS - 1 else f"{lag} behind"


def lag_chart(element: str, lag_tokens: dict[int, list[int]]) -> Chart:
    """Shares of trained tokens by lag, over steps; neighbouring steps are added up when there are many."""
    steps = sorted(lag_tokens)
    width = max(1, -(-len(steps) // _MOST_BINS))
    columns: dict[str, list[Any]] = {name: [] for name in ("start", "end", "low", "high", "part", "text")}
    for first in range(0, len(steps), width):
        cut = steps[first : first + width]
        sums = [sum(lag_tokens[step][lag] for step in cut) for lag in range(LAGS)]
        low = 0.0
        for lag, number in enumerate(sums):
            if number:
                high = low + number / sum(sums)
                where = f"step {cut[0]}" if len(cut) == 1 else f"steps {cut[0]} to {cut[-1]}"
                text = f"{where}: {share(number, sum(sums))} of tokens, {lag_name(lag)}"
                row = (cut[0] - 0.5, cut[-1] + 0.5, rounded(low), rounded(high), lag, text)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
                low = high
    return {"element": element, "kind": "parts", "parts": columns, "spec": shares(height=150, x_title="step")}


def episode_section(experience: Experience) -> Html:
    """Failed episodes by cause, and how episodes ended."""
    failed = int(sum(experience.causes.values()))
    rows = [
        (cause, f"{number:,}", share(number, failed)) for cause, number in experience.causes.most_common(_MOST_CAUSES)
    ]
    made: list[Html] = []
    if rows:
        headings = ("cause (numbers shown as #)", "episodes", "share of the failed")
        made.append(table(headings, rows, label="failed episodes by cause", numbers=(1, 2)))
        if len(experience.causes) > _MOST_CAUSES:
            made.append(tag("p", f"{len(experience.causes) - _MOST_CAUSES} rarer causes are left out.", _class="quiet"))
    else:
        made.append(tag("p", f"None of {many(experience.trajectories, 'episode')} failed.", _class="quiet"))
    ends = [
        (reason, f"{number:,}", share(number, experience.trajectories))
        for reason, number in experience.finish_reasons.most_common()
    ]
    if ends:
        made.append(tag("h3", "How episodes ended"))
        made.append(table(("finish reason", "episodes", "share"), ends, label="finish reasons", numbers=(1, 2)))
    return joined(made)


def weights_words(versions: Sequence[VersionRow]) -> Html:
    """Sums over all versions."""
    rows = []
    for kind in ("keyframe", "delta"):
        own = [row for row in versions if row.kind == kind]
        if own:
            total = sum(row.bytes for row in own)
            published = [row.published_s for row in own if row.published_s is not None]
            prepared = [row.prepared_s for row in own if row.prepared_s is not None]
            paused = [row.paused_s for row in own if row.paused_s is not None]
            worst = (f"{span(max(values))}" if values else "–" for values in (published, prepared))  # noqa: RUF001
            pause = f"{1000 * max(paused):.1f} ms" if paused else "–"  # noqa: RUF001
            rows.append((kind, f"{len(own):,}", size(total), size(total / len(own)), *worst, pause))
    if not rows:
        return tag("p", "No policy version was published.", _class="quiet")
    headings = (
        "kind",
        "versions",
        "bytes",
        "mean",
        "slowest to publish",
        "slowest to fetch",
        "longest pause of decoding",
    )
    return table(headings, rows, label="bytes and times of weights", numbers=range(1, 7))


def weights_charts(
    bytes_element: str, times_element: str, versions: Sequence[VersionRow]
) -> tuple[list[Chart], dict[str, Any]]:
    """Bytes and times by version, and the table that the times come from; thinned out when there are very many."""
    width = max(1, -(-len(versions) // (3 * _MOST_BINS)))
    columns: dict[str, list[Any]] = {name: [] for name in ("start", "end", "low", "high", "part", "text")}
    kept: list[VersionRow] = []
    for first in range(0, len(versions), width):
        cut = versions[first : first + width]
        largest = max(cut, key=lambda row: row.bytes)
        kept.append(largest)
        text = f"version {largest.version}: {largest.kind}, {size(largest.bytes)}"
        text += f" (the largest of {len(cut)})" if len(cut) > 1 else ""
        is_full = int(largest.kind == "keyframe")
        row = (cut[0].version - 0.5, cut[-1].version + 0.5, 0, largest.bytes, is_full, text)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    times: dict[str, Any] = {
        "version": [row.version for row in kept],
        "published": [rounded(row.published_s) for row in kept],
        "prepared": [rounded(row.prepared_s) for row in kept],
        "paused": [rounded(row.paused_s) for row in kept],
    }
    names = (
        ("published", "publishing", "@c1"),
        ("prepared", "fetching, slowest worker", "@c3"),
        ("paused", "decoding paused", "@c2"),
    )
    series = [
        {"column": name, "label": label, "width": 1.5, "colour": colour}
        for name, label, colour in names
        if any(value is not None for value in times[name])
    ]
    spec = curve(height=150, has_dots=len(kept) <= _DOTS_BELOW, has_zero=True, x_title="policy version")
    charts: list[Chart] = [
        {
            "element": bytes_element,
            "kind": "parts",
            "parts": columns,
            "spec": bars(height=150, x_title="policy version"),
        }
    ]
    if series:
        charts.append(
            {
                "element": times_element,
                "kind": "curve",
                "table": "versions",
                "x": "version",
                "unit": " s",
                "series": series,
                "spec": spec,
            }
        )
    return charts, times


def sample_cards(samples: Sequence[Shown], run: str) -> Html:
    """The chosen samples as conversations."""
    if not samples:
        return tag("p", "There are no readable samples of recorded steps.", _class="quiet")
    return tag("div", *(_card(sample, run) for sample in samples), _class="samples")


def _card(sample: Shown, run: str) -> Html:
    t = sample.trajectory
    parts = ", ".join(f"{name} {figure(value)}" for name, value in t.rewards.items())
    facts = [
        sample.fate_text,
        sample.lag_text,
        many(t.response_tokens, "token"),
        f"ended: {t.finish_reason}",
        t.worker,
        *([f"parts of the reward: {parts}"] if parts else []),
    ]
    command = f"milesbatch traj show {run} {t.group_id} --sample {t.sample_index}"
    return tag(
        "article",
        tag("header",
            tag("h3", sample.choice.kind), tag("p", sample.choice.why, _class="quiet"),
            tag("p", tag("strong", f"reward {figure(t.reward)}"), _class="reward")),
        *(_message(message.role, message.content, message.tool_calls) for message in t.messages),
        tag("pre", cut(t.error), _class="message error") if t.error else None,
        tag("p", " · ".join(facts), _class="quiet"),
        tag("p", tag("code", command), _class="quiet"),
        _class="card sample",
    )  # fmt: skip


def _message(role: str, content: str, tool_calls: str | None) -> Html:
    known = role if role in ("system", "user", "assistant", "tool") else "other"
    calls = tag("pre", cut(tool_calls), _class="calls") if tool_calls else None
    body = tag("pre", cut(content), dir="auto") if content else tag("p", "(empty)", _class="quiet")
    return tag("div", tag("span", role, _class="role"), body, calls, _class=f"message {known}")


def cut(text: str | None) -> str:
    """A text of bearable length; says what was cut off."""
    words = text or ""
    if len(words) <= _LONGEST_TEXT:
        return words
    return f"{words[:_LONGEST_TEXT]}\n… {len(words) - _LONGEST_TEXT:,} more characters"


def recipe_details(recipe: str) -> Html:
    """The frozen recipe, folded."""
    return tag(
        "details",
        tag("summary", "The frozen recipe (recipe.yaml)"),
        tag("pre", recipe or "recipe.yaml cannot be read", tabindex="0", aria_label="recipe.yaml"),
    )
