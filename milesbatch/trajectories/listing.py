"""The batch records of a run, one by one, with damaged ones reported beside the rest.

Owns looking. Never changes anything, or decides a fate, or says which records count (:mod:`milesbatch.analysis.history` does).
Invariant: one damaged record costs itself only. The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

from milesbatch.errors import MilesbatchError
from milesbatch.records import BatchRecord
from milesbatch.store.durable import read_optional, storage_error
from milesbatch.store.layout import RunLayout


def read_batches(layout: RunLayout) -> tuple[list[BatchRecord], list[MilesbatchError]]:
    """Every readable batch record in the order of steps, and an error for each that is not."""
    records, errors = [], []
    try:
        paths = sorted(layout.batches.glob("[0-9]*.json"), key=lambda path: (len(path.name), path.name))
    except OSError as error:
        raise storage_error(layout.batches, error) from error
    for path in paths:
        try:
            records.append(BatchRecord.from_bytes(read_optional(path) or b"", str(path)))
        except MilesbatchError as error:
            errors.append(error)
    return records, errors
