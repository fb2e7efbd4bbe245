"""Makes the page and the trace of a run, and writes them. The entry of this package.

Durability: a page is replaced as a whole, so that whoever looks at it sees the old or the new one; it can be made again at any
time and is not synced. Invariant: nothing inside the run directory changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import InputError
from milesbatch.report.page.document import chart_library, page
from milesbatch.report.page.material import gather
from milesbatch.store.clock import utc_now
from milesbatch.store.durable import replace_hint
from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import read_evidence
from milesbatch.timeline.slices import tell
from milesbatch.timeline.trace import trace_bytes, trace_document
from milesbatch.timeline.troubles import find_troubles

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    path: Path
    bytes: int
    gaps: tuple[str, ...]
    """What of the run could not be read, in words."""


def write_page(
    layout: RunLayout, path: Path, *, with_audit: bool, tell_progress: Tell, samples: Path | None = None
) -> Written:
    """Write the report of a run as one HTML file; with ``samples`` also the samples that it shows, a JSON object in each line.

    Raises:
        StorageError: it cannot be written. InputError: its directory does not exist.
    """
    for place in (path, samples):
        if place is not None:
            _check_place(place)
    material = gather(layout, utc_now(), with_audit=with_audit, tell_progress=tell_progress)
    data = page(material, chart_library(tell_progress)).encode("utf-8", "replace")
    replace_hint(path, data)
    if samples is not None:
        lines = [json.dumps(sample.to_json(), ensure_ascii=False) for sample in material.samples]
        replace_hint(samples, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    return Written(path, len(data), tuple(material.gaps))


def write_trace(layout: RunLayout, path: Path) -> Written:
    """Write the timeline of a run for Perfetto: Chrome trace events as one JSON document.

    Raises:
        StorageError: it cannot be written. InputError: its directory does not exist.
    """
    _check_place(path)
    evidence = read_evidence(layout, sum(1 for _ in layout.incarnations.glob("[0-9]*.json")))
    story = tell(evidence)
    document = trace_document(layout.root.resolve().name, evidence, story, find_troubles(evidence, story))
    data = trace_bytes(document)
    replace_hint(path, data)
    return Written(path, len(data), evidence.gaps)


def _check_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a directory", mend="make it first, or give another path with -o")
    if path.is_dir():
        raise InputError(f"{path} is a directory", mend="give the name of a file")
