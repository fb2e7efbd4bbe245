"""Where commands may write what a person asked for: outside of every run directory, and each thing to a place of its own.

Owns that refusal. Never writes. Invariant: no command that only looks at a run can write over one of its files, whatever path
it was given.
"""

from __future__ import annotations

import os
from pathlib import Path

from milesbatch.errors import InputError
from milesbatch.store.layout import RunLayout


def check_outputs(*places: Path | None) -> None:
    """Accept ``places`` (None is passed over), files or directories, whether they exist or not.

    Raises:
        InputError: one is, or is inside, a run directory; or two are the same.
    """
    seen: dict[str, Path] = {}
    for place in places:
        if place is None:
            continue
        real = os.path.realpath(place)  # no error for a loop of links: writing there gives it
        run = next(
            (above for above in (Path(real), *Path(real).parents) if RunLayout(above).run_record.is_file()), None
        )
        if run is not None:
            raise InputError(
                f"{place} is inside the run {run}; only the run itself writes there",
                mend="give -o, or the option that names the file, a place outside of it",
            )
        if real in seen:
            raise InputError(f"{seen[real]} and {place} are the same file", mend="give each a name of its own")
        seen[real] = place
