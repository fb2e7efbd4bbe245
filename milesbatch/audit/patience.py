"""Looking again before a violation counts: a shared filesystem may have shown an auditor on another host an old view.

Owns the second and third look of ``milesbatch audit``; a run without violations is looked at once. Invariant: what is
reported, and what a repair moves, is what the last look found. The page behind it is ``docs/audit.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from milesbatch.audit.findings import Findings
from milesbatch.audit.prove import examine
from milesbatch.audit.verdict import Verdict
from milesbatch.store.layout import RunLayout
from milesbatch.store.mounts import is_local
from milesbatch.store.sight import refresh

_SOON_S = 5.0
"""Enough for Lustre and BeeGFS, and for NFS where the auditor may write; NFS alone takes up to a minute."""


def looks_after(layout: RunLayout, wait_s: float) -> tuple[float, ...]:
    """Seconds after which to look again, one after the other; none where no other host can be ahead of this one."""
    return () if wait_s == 0 or is_local(layout.root) else (min(_SOON_S, wait_s), max(wait_s - _SOON_S, 0.0))


def examine_patiently(
    layout: RunLayout, waits_s: Sequence[float], tell: Callable[[str], None], *, before_repair: bool = False
) -> tuple[Verdict, Findings]:
    """:func:`milesbatch.audit.prove.examine`, repeated after each of ``waits_s`` seconds while there are violations, or,
    with ``before_repair``, anything that a repair would move."""
    for wait_s in waits_s:
        verdict, findings = examine(layout)
        found = [f"{violation.path}: {violation.detail}" for violation in verdict.violations]
        if before_repair:
            found += [f"{findings.relative(path)}: {detail}" for path, detail in findings.movable.items()]
        if not found:
            return verdict, findings
        tell(f"{found[0]}; files of other hosts may show late: looking again in {wait_s:g} s")
        for directory in (layout.root, *layout.directories()):
            refresh(directory)
        time.sleep(wait_s)
    return examine(layout)
