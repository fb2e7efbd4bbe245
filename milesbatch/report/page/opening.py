"""The top of the page: state, what stopped the run, the audit's verdict, what is missing. Pure: from material to markup."""

from __future__ import annotations

from typing import Any

from milesbatch.report.lineage import Lineage, parent_in_words
from milesbatch.report.page.html import Html, joined, tag
from milesbatch.report.page.material import Material
from milesbatch.report.page.steps import Steps
from milesbatch.report.page.words import many, moment, share, span
from milesbatch.report.summary import first_and_last

_GOING_ON = ("running", "queued", "draining")
_MOST_GAPS = 60
_MOST_CHANGES = 12
_MOST_FINDINGS = 40


def headline(material: Material, steps: Steps) -> Html:
    """Name, state, one sentence, and the figures that matter most."""
    status = material.status or {}
    state = str(status.get("state", "unknown"))
    return joined(
        [
            tag("p", "training run", _class="kicker"),
            tag("h1", material.name, " ", tag("span", state, _class=f"pill {_state_class(state)}")),
            tag("p", _sentence(material, steps, status), _class="lead"),
            _lineage(material.lineage),
            _going_on(state, material.made_at),
            tag("dl", *_tiles(material, steps, status), _class="tiles"),
        ]
    )


def _lineage(found: Lineage | None) -> Html | None:
    """Of a fork: where it began, and what is different from there on."""
    if found is None:
        return None
    shown = [f"{path}: {old} → {new}" for path, old, new in found.changes[:_MOST_CHANGES]]
    if len(found.changes) > _MOST_CHANGES:
        shown.append(f"and {len(found.changes) - _MOST_CHANGES} more")
    words = f"A fork: it began with {parent_in_words(found.forked_from)}, and its curves begin behind that step. "
    words += f"Different from its parent: {'; '.join(shown)}." if shown else "Its recipe is that of its parent."
    return tag("p", words, id="lineage")


def _state_class(state: str) -> str:
    return {"finished": "good", "failed": "bad"}.get(state, "busy" if state in _GOING_ON else "warn")


def _going_on(state: str, made_at: str) -> Html | None:
    if state not in _GOING_ON:
        return None
    words = f"This run was still going on when the page was made ({made_at[:19]}Z). Make it again for what came since."
    return tag("p", words, _class="notice busy", role="status")


def _sentence(material: Material, steps: Steps, status: dict[str, Any]) -> str:
    done, wanted = status.get("step"), status.get("steps")
    step = steps.step[-1] if steps.step else 0
    text = f"{many(done if done is not None else step, 'step')}"
    text += f" of {wanted:,}" if wanted else ""
    if material.story.incarnations:
        first, last = material.story.incarnations[0][1], material.story.incarnations[-1][2]
        text += f", from {moment(first)} to {moment(last)} UTC ({span(last - first)})"
    restarts = _restarts(material)
    text += f", with {many(restarts, 'restart')}." if restarts else ", without a restart."
    note = status.get("note")
    return f"{text} {str(note)[0].upper()}{str(note)[1:]}." if note else text


def _restarts(material: Material) -> int:
    return sum(life.attempt > 1 for life in material.story.lives) + max(len(material.incarnations) - 1, 0)


def _tiles(material: Material, steps: Steps, status: dict[str, Any]) -> list[Html]:
    rewards = [value for value in steps.column("reward_mean") if value is not None]
    few, reward = 1, "–"  # noqa: RUF001 - a dash for no figure
    if rewards:
        few, first, last = first_and_last(rewards)
        reward = f"{first:.3f} → {last:.3f}"
    experience = material.experience
    failed = int(sum(experience.causes.values()))
    lags = [sum(column) for column in zip(*experience.lag_tokens.values(), strict=True)] or [0]
    verdict, word = _verdict(material)
    jobs = ", ".join(map(str, status.get("job_ids", []))) or "none"
    return [
        _tile("Mean reward", reward, f"first and last {many(few, 'step')}"),
        _tile("Audit", verdict, word, {"sound": "good", "not sound": "bad"}.get(verdict)),
        _tile("Restarts", str(_restarts(material)), f"{many(len(material.incarnations), 'incarnation')}; jobs: {jobs}"),
        _tile("Trajectories", f"{experience.trajectories:,}", f"{experience.tokens:,} response tokens"),
        _tile("Failed episodes", share(failed, experience.trajectories), f"{failed:,} of {experience.trajectories:,}"),
        _tile("Stale tokens", share(sum(lags[1:]), sum(lags)), "trained tokens of an older policy version"),
    ]


def _tile(name: str, value: str, more: str, mood: str | None = None) -> Html:
    return tag("div", tag("dt", name), tag("dd", value, tag("span", more), _class=mood))


def _verdict(material: Material) -> tuple[str, str]:
    verdict = material.verdict
    if verdict is None:
        return "not known", "it could not be audited" if material.was_audited else "left out (--no-audit)"
    if verdict.ok:
        return "sound", f"{verdict.files:,} files proven"
    return "not sound", many(len(verdict.violations), "violation")


def stop_cause(material: Material) -> Html | None:
    """What made the run end badly: the first cause, who, and the decisive lines of its log."""
    status = material.status or {}
    if not status.get("cause"):
        return None
    failure: dict[str, Any] = status.get("failure") or {}
    first, *rest = str(status["cause"]).splitlines()
    facts = []
    if failure:
        facts.append(("Who", f"{failure.get('name')}" + (f" on {failure['host']}" if failure.get("host") else "")))
        if failure.get("reason"):
            facts.append(("Ended", str(failure["reason"])))
        if failure.get("log"):
            facts.append(("Log", str(failure["log"])))
    checkpoint, replays = status.get("last_checkpoint_step"), status.get("would_be_replayed")
    facts.append(("Kept", f"checkpoint of step {checkpoint}; {replays} steps would be replayed by the next start"))
    lines = [*rest, *(line for line in failure.get("lines", ()) if line not in str(status["cause"]))]
    return tag(
        "section",
        tag("h2", "What stopped it", id="h-cause"),
        tag("p", first, _class="cause"),
        tag("dl", *(joined([tag("dt", name), tag("dd", value)]) for name, value in facts), _class="facts"),
        tag("pre", "\n".join(lines), tabindex="0", aria_label="decisive lines of the log") if lines else None,
        id="cause", _class="card bad", aria_labelledby="h-cause",
    )  # fmt: skip


def missing(material: Material) -> Html | None:
    """What could not be read."""
    gaps = material.gaps
    if not gaps:
        return None
    items = [tag("li", gap) for gap in gaps[:_MOST_GAPS]]
    if len(gaps) > _MOST_GAPS:
        items.append(tag("li", f"and {len(gaps) - _MOST_GAPS} more"))
    words = "The page was made without it; what it would have said is left out, not counted as 0."
    return tag(
        "section",
        tag("h2", f"{many(len(gaps), 'thing')} could not be read", id="h-missing"),
        tag("p", words),
        tag("ul", *items),
        id="missing", _class="card warn", aria_labelledby="h-missing",
    )  # fmt: skip


def audit_section(material: Material) -> Html:
    """The whole verdict."""
    verdict = material.verdict
    if verdict is None:
        words = "The run was not audited for this page." if not material.was_audited else "The audit could not be done."
        return tag("p", words, " ", tag("code", f"milesbatch audit {material.name}"), " does it.")
    groups = verdict.groups
    facts = [
        ("Verdict", "sound: no violation" if verdict.ok else f"not sound: {many(len(verdict.violations), 'violation')}"),
        ("Groups", f"{groups.trained:,} trained, {groups.rejected:,} rejected, {groups.pending:,} pending, "
                   f"{groups.lost:,} lost, {groups.repeated:,} repeated"),
        ("Policy versions", f"{verdict.first_version} to {verdict.last_version}, "
                            f"{verdict.verified_versions} rebuilt and proven"),
        ("Checkpoints", ", ".join(map(str, verdict.checkpoints)) or "none"),
        ("Work repeated", f"{many(len(verdict.replayed), 'step')} replayed, "
                          f"{many(verdict.generated_again, 'group')} generated again"),
        ("Read", f"{verdict.files:,} files, {verdict.bytes:,} bytes"),
    ]  # fmt: skip
    findings = [*(("violation", f) for f in verdict.violations), *(("note", f) for f in verdict.notes)]
    items = [
        tag("li", tag("strong", f"{word} ({finding.kind}): "), f"{finding.path}: {finding.detail}", _class=word)
        for word, finding in findings[:_MOST_FINDINGS]
    ]
    if len(findings) > _MOST_FINDINGS:
        items.append(tag("li", f"and {len(findings) - _MOST_FINDINGS} more; milesbatch audit lists all"))
    return joined(
        [
            tag("dl", *(joined([tag("dt", name), tag("dd", value)]) for name, value in facts), _class="facts"),
            tag("ul", *items, _class="findings") if items else None,
        ]
    )
