"""The verdict of a drill as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

from html import escape

from milesbatch.drill.verdict import DrillVerdict, FaultVerdict

HEADINGS = (
    "fault",
    "what happened",
    "verdict",
    "detected s",
    "resumed s",
    "steps replayed",
    "generated again",
    "lost",
    "repeated",
    "digest",
    "audit",
    "starts",
)

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #1b1f24; } td { border-bottom: 1px solid #d8dee4; } td.n { text-align: right; }
.good { color: #116329; } .bad { color: #a40e26; font-weight: 600; } code { font-size: 12px; }
"""


def cells(fault: FaultVerdict) -> tuple[str, ...]:
    """A fault as one line of a table, in the order of ``HEADINGS``."""
    return (
        fault.fault,
        fault.what,
        fault.word,
        seconds(fault.detected_s),
        seconds(fault.resumed_s),
        str(fault.steps_replayed),
        str(fault.groups_generated_again),
        str(fault.groups_lost),
        str(fault.groups_repeated),
        {True: "equal", False: "DIFFERS", None: "-"}[fault.digest_equal],
        "sound" if fault.audit_ok else "NOT SOUND",
        str(fault.starts),
    )


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def page(verdict: DrillVerdict) -> str:
    """The whole page."""
    word = '<span class="good">every promise held</span>' if verdict.ok else '<span class="bad">not well</span>'
    title = f"drill of {escape(verdict.recipe)}"
    changes = "".join(f"<li><code>{escape(change)}</code></li>" for change in verdict.changes)
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    rows = "\n".join(_row(fault) for fault in verdict.faults)
    problems = "".join(f"<li>unbroken run: {escape(text)}</li>" for text in verdict.unbroken_problems)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}: {word}</h1>
<p>{len(verdict.faults)} faults in {verdict.seconds:.0f} s; {verdict.steps} steps;
last weights digest of the unbroken run <code>{escape(str(verdict.weights_digest))}</code>.</p>
<ul class="bad">{problems}</ul>
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table>
<h2>Small form</h2><p>The recipe was drilled with these changes:</p><ul>{changes}</ul>
</body></html>
"""


def _row(fault: FaultVerdict) -> str:
    texts = list(cells(fault))
    kind = "good" if fault.ok else "bad"
    marked = [f"<td>{escape(texts[0])}</td>", f"<td>{escape(texts[1])}{_problems(fault)}</td>"]
    marked.append(f'<td class="{kind}">{escape(texts[2])}</td>')
    marked += [f'<td class="n">{escape(text)}</td>' for text in texts[3:]]
    return f"<tr>{''.join(marked)}</tr>"


def _problems(fault: FaultVerdict) -> str:
    return "".join(f'<br><span class="bad">{escape(problem)}</span>' for problem in fault.problems)
