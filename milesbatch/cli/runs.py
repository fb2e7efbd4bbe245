"""Which run does the user mean? A directory, or a name under ``$MILESBATCH_RUNS``."""

from __future__ import annotations

from pathlib import Path

from milesbatch.cluster.context import runs_directory
from milesbatch.errors import InputError
from milesbatch.store.layout import RunLayout


def find_run(text: str) -> RunLayout:
    """The run that ``text`` names.

    Raises:
        InputError: there is no run under that name; lists those that exist.
    """
    candidates = [Path(text)]
    if Path(text).name == text:
        candidates.append(runs_directory() / text)
    for candidate in candidates:
        if RunLayout(candidate).run_record.exists():
            return RunLayout(candidate)
    runs = sorted(path.parent.name for path in runs_directory().glob("*/run.json"))
    raise InputError(
        f"there is no run at {' or '.join(map(str, candidates))}",
        mend=f"runs under {runs_directory()}: {', '.join(runs) or 'none'}; or give the path of a run directory",
    )
