"""The sections about time and trouble: reward and its jumps, faults and restarts, the timeline. Pure: from material to markup.

Owns: words and tables. Never: finding (``jumps.py``, ``timeline``). The page behind it is ``docs/report.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

from milesbatch.analysis.jumps import Jump
from milesbatch.report.page.html import Html, joined, table, tag
from milesbatch.report.page.lanes import Lanes
from milesbatch.report.page.material import Material
from milesbatch.report.page.steps import Steps
from milesbatch.report.page.words import clock, figure, many, moment, share, short_moment, span
from milesbatch.timeline.losses import add_up_losses
from milesbatch.timeline.slices import ACTIVITIES, Story
from milesbatch.timeline.troubles import Trouble

_MOST_TROUBLES = 300
_DAY_S = 86_400
_ENOUGH = 12
"""Steps without which nothing is said about what a figure usually does."""
_NO_EXPLANATION = ("reward", "step", "seconds", "weights_", "microbatches", "samples")
_KINDS = {
    "died": "died",
    "restarted": "restarted",
    "lost": "lost",
    "failed": "run failed",
    "stopping": "stopped",
    "incarnation": "run started again",
    "storage": "no space",
    "data": "data mended",
    "kept": "work kept",
    "fault": "injected fault",
}
_ACTIVITY_WORDS = {
    "training": "training",
    "replaying": "replaying",
    "publishing": "publishing weights",
    "generating": "generating",
    "evaluating": "evaluating",
    "weights": "fetching weights",
    "checkpoint": "standing still for a checkpoint",
    "saving": "saving a checkpoint",
    "waiting": "waiting",
    "starting": "starting",
    "stopping": "stopping",
}


def step_button(step: int) -> Html:
    """A button that points all curves at a step."""
    return tag("button", f"{step}", type="button", data_step=step, aria_label=f"show step {step} in all curves")


def jump_table(jumps: Sequence[Jump], steps: Steps) -> Html:
    """Where the reward changed most, and what else changed there."""
    if not jumps:
        return tag("p", "There are too few steps to look for jumps.", _class="quiet")
    rows = [
        (
            f"{rank}",
            step_button(jump.step),
            tag("span", f"{jump.before:.3f} → {jump.after:.3f}", _class="one"),
            f"{jump.change:+.3f}",
            tag("span", "clear" if jump.is_clear else "may be noise", _class="one"),
            beside(jump, steps) or "nothing else stands out",
        )
        for rank, jump in enumerate(jumps, 1)
    ]
    headings = ("mark", "at step", "level", "change", "how sure", "also changed")
    label = "the largest jumps of the reward"
    window = jumps[0].window
    words = (
        f"Means over {many(window, 'step')} before and from the step on."
        if window > 1
        else "From one step to the next."
    )
    words += " Dotted lines: the run was started again, or steps were replayed. Triangles: a process died or was lost."
    made = table(headings, rows, label=label, numbers=(3,), is_stacked=True)
    return joined([made, tag("p", words, _class="quiet")])


def beside(jump: Jump, steps: Steps) -> str:
    """What else happened at a jump: restarts, and figures whose level moved by over one and a half of their spreads."""
    place = next((p for p, step in enumerate(steps.step) if step >= jump.step), None)
    if place is None:
        return ""
    reach = max(1, round(jump.window / steps.width))
    notes = []
    near = range(max(1, place - reach), min(len(steps.step), place + reach))
    for other in near:
        if steps.incarnation[other] != steps.incarnation[other - 1]:
            notes.append(f"incarnation {steps.incarnation[other]} began at step {steps.step[other]}")
    again = [steps.step[other] for other in near if steps.replays[other]]
    if again:
        notes.append(f"replayed after a restart: step {', '.join(map(str, again[:5]))}")
    moved = []
    for name in steps.names():
        change = _moved(steps.column(name), place, reach)
        if change is not None and not name.startswith(_NO_EXPLANATION) and not name.endswith("_s"):
            moved.append((abs(change[0]), f"{name.replace('_', ' ')} {figure(change[1])} → {figure(change[2])}"))
    return "; ".join([*notes, *(words for _, words in sorted(moved, reverse=True)[:3])])


def _moved(column: Sequence[float | None], place: int, reach: int) -> tuple[float, float, float] | None:
    before = [v for v in column[max(0, place - reach) : place] if v is not None]
    after = [v for v in column[place : place + reach] if v is not None]
    known = [v for v in column if v is not None]
    if not before or not after or len(known) < _ENOUGH:
        return None
    middle = sum(known) / len(known)
    spread = (sum((v - middle) ** 2 for v in known) / len(known)) ** 0.5
    first, second = sum(before) / len(before), sum(after) / len(after)
    return ((second - first) / spread, first, second) if spread and abs(second - first) > 1.5 * spread else None


def trouble_table(troubles: Sequence[Trouble]) -> Html:
    """Who restarted, when, why, and what came of it."""
    if not troubles:
        return tag("p", "No process died, nothing was started again, and no fault was told of.", _class="quiet")
    rows = []
    when = clock if troubles[-1].at_s - troubles[0].at_s < _DAY_S else short_moment
    for trouble in troubles[:_MOST_TROUBLES]:
        at_ms = round(trouble.at_s * 1000)
        show = tag(
            "button", when(trouble.at_s), type="button", data_at=at_ms,
            aria_label=f"show {clock(trouble.at_s)} on the timeline",
        )  # fmt: skip
        why = [tag("span", trouble.what)]
        if trouble.said:
            why.append(tag("span", "it said: ", tag("q", trouble.said[:600]), _class="said"))
        who = [
            tag("strong", trouble.who, _class="who", title=trouble.who),
            tag("span", f"on {trouble.host}", _class="host") if trouble.host else None,
        ]
        kind = tag("span", _KINDS[trouble.kind], _class=f"kind {trouble.kind}")
        rows.append((show, joined(who), kind, joined(why), trouble.then))
    headings = ("time (UTC)", "who", "what", "why", "result")
    made = table(headings, rows, label="faults, restarts and interruptions", is_stacked=True)
    left_out = len(troubles) - _MOST_TROUBLES
    return joined(
        [made, tag("p", f"{left_out} later ones are left out here.", _class="quiet") if left_out > 0 else None]
    )


def cost_of_faults(story: Story) -> Html | None:
    """One line: what faults and restarts cost in all, and by cause."""
    lost = add_up_losses(story)
    if not lost.total_s and not lost.workers_s:
        return None
    parts = [
        f"{words} {span(seconds)}"
        for words, seconds in (
            ("between two starts of the run", lost.between_s),
            ("the trainer away or starting again", lost.starting_s),
            ("replaying recorded steps", lost.replaying_s),
        )
        if seconds
    ]
    text = f"Time lost: {span(lost.total_s)} of {span(lost.whole_s)} ({share(lost.total_s, lost.whole_s)})"
    text += f": {', '.join(parts)}." if parts else "."
    if lost.workers_s:
        text += (
            f" Rollout workers were away or starting again for {span(lost.workers_s)}, added up; the others went on."
        )
    return tag("p", text, id="time-lost")


def timeline_section(lanes: Lanes, story: Story) -> Html:
    """Legend, buttons, and the place of the chart."""
    used = {piece.activity for piece in story.slices}
    legend = [
        tag("li", tag("i", _class=f"swatch a-{name}"), _ACTIVITY_WORDS[name]) for name in ACTIVITIES if name in used
    ]
    legend.append(tag("li", tag("i", _class="swatch a-life"), "alive"))
    legend.append(tag("li", tag("i", _class="swatch mark"), "fault or restart"))
    buttons = [
        tag("button", words, type="button", data_zoom=what)
        for what, words in (
            ("whole", "Whole run"), ("in", "Zoom in"), ("out", "Zoom out"), ("left", "Earlier"), ("right", "Later"),
        )
    ]  # fmt: skip
    if len(story.incarnations) > 1:
        buttons += [
            tag("button", f"Incarnation {number}", type="button", data_from=round(a * 1000), data_to=round(b * 1000))
            for number, a, b in story.incarnations[:12]
        ]
    notes = ["Drag across the chart to look closer. All times are UTC, by the clock of each host."]
    if lanes.is_reduced:
        notes.append("There are very many slices: heights are shares of time; close up, each slice is shown.")
    if lanes.hidden:
        notes.append(f"{many(lanes.hidden, 'process', 'processes')} without a trouble have no lane here.")
    return joined(
        [
            tag("ul", *legend, _class="legend", aria_label="colours"),
            tag("div", *buttons, _class="buttons", role="group", aria_label="part of the timeline"),
            tag("div", id="chart-timeline", _class="chart", tabindex="0", role="group",
                aria_label="timeline of all processes; arrow keys move, plus and minus zoom, home shows all"),
            tag("p", " ".join(notes), " ", tag("code", "milesbatch report RUN --trace FILE"),
                " writes every slice for Perfetto.", _class="quiet"),
        ]
    )  # fmt: skip


def time_table(story: Story) -> Html:
    """Where each role's time went."""
    spent: dict[str, dict[str, float]] = {}
    alive: dict[str, float] = {}
    for piece in story.slices:
        if piece.track != "saving":
            role = _time_role(piece.process)
            sums = spent.setdefault(role, {})
            sums[piece.activity] = sums.get(piece.activity, 0.0) + piece.end_s - piece.start_s
    for life in story.lives:
        role = _time_role(life.process)
        alive[role] = alive.get(role, 0.0) + life.end_s - life.start_s
    rows = []
    for role in sorted(set(spent) & set(alive), key=lambda name: (name != "trainer-0", name)):
        parts = sorted(spent[role].items(), key=lambda item: -item[1])
        whole_s = max(alive[role], sum(spent[role].values()), 1e-9)
        fills = [tag("i", _class=f"a-{name}", style=f"width:{100 * seconds / whole_s:.2f}%") for name, seconds in parts]
        words = [
            tag(
                "li",
                tag("i", _class=f"swatch a-{name}"),
                f"{_ACTIVITY_WORDS[name]} {span(seconds)}, {share(seconds, whole_s)}",
            )
            for name, seconds in parts
        ]
        bar = joined([tag("span", *fills, _class="meter"), tag("ul", *words, _class="legend")])
        rows.append((tag("strong", role), span(alive[role]), bar))
    if not rows:
        return tag("p", "No event tells where the time went.", _class="quiet")
    return table(("process", "alive", "spent on"), rows, label="where the time went", numbers=(1,), is_stacked=True)


def _time_role(process: str) -> str:
    """The trainer's rank 0 speaks for the trainer; workers are added up."""
    role, _, index = process.rpartition("-")
    return "all rollout workers" if role == "rollout" else process if index == "0" else f"other {role} ranks"


def incarnation_table(material: Material, frozen: dict[str, object]) -> Html:
    """Each start of the run: when, where, why, and which fields of the recipe were changed for it."""
    rows = []
    for record in material.incarnations:
        changes = [
            f"{path}: {frozen.get(path, '(not set)')} → {value}" for path, value in record.recipe_changes.items()
        ]
        rows.append(
            (str(record.incarnation), record.started_at[:19].replace("T", " "), f"{record.host} (job {record.job_id})",
             record.cause, joined([tag("div", change) for change in changes]) if changes else "none")
        )  # fmt: skip
    headings = ("incarnation", "began (UTC)", "where", "why", "recipe changes")
    return table(headings, rows, label="incarnations and changes to the recipe", is_stacked=True)


def step_table(steps: Steps) -> Html:
    """Every step with its figures."""
    wanted = (
        "reward_mean",
        "loss",
        "kl",
        "entropy",
        "ratio_max",
        "length_mean",
        "grad_norm",
        "lag_mean",
        "failed",
        "wait_s",
        "train_s",
    )
    names = [name for name in wanted if name in steps.names()]
    rows = []
    for place, step in enumerate(steps.step):
        figures = [figure(steps.column(name)[place]) for name in names]
        again = f", replayed {steps.replays[place]}×" if steps.replays[place] else ""  # noqa: RUF001 - times
        start = f"{steps.incarnation[place]}{again}"
        rows.append((step_button(step), clock(steps.at_s[place]), *figures, tag("span", start, _class="one")))
    headings = ("step", "done (UTC)", *(name.replace("_", " ") for name in names), "start")
    identify = {place: f"step-{step}" for place, step in enumerate(steps.step)}
    numbers = range(2, len(names) + 2)
    first = f" The first was done at {moment(steps.at_s[0])} UTC." if steps.at_s else ""
    words = f"Each line is the mean over {steps.width} steps." if steps.width > 1 else f"One line for each step.{first}"
    return joined(
        [
            tag("p", words, _class="quiet"),
            table(headings, rows, label="figures of every step", numbers=numbers, identify=identify),
        ]
    )
