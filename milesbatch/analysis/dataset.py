"""A run's counted trajectories as a ``pyarrow.dataset.Dataset``: what DuckDB and others scan with only the columns
they need.

Owns the translation of (columns, filter) to a scan. Never reads by itself. Invariant: a file is left out only when the
filter, looked at with what is known of the file's groups, cannot be true for any of its rows. Source: DuckDB asks any
subclass of ``Dataset`` for a scanner, as it does for those of other table formats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as arrow_dataset

from milesbatch.analysis.scan import COLUMNS, GROUP_COLUMNS, SCHEMA, TrajectoryScan

_WORD = re.compile(r"[A-Za-z_]\w*")


class RunDataset(arrow_dataset.Dataset):  # type: ignore[misc]
    """The rows of a :class:`~milesbatch.analysis.scan.TrajectoryScan`."""

    def __init__(self, scan: TrajectoryScan) -> None:
        # The base class is made by its own factories only; everything that it offers goes through `scanner`.
        self._scan = scan

    @property
    def schema(self) -> Any:
        """Columns of the trajectories, with what became of them."""
        return SCHEMA

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any) -> Any:
        """A ``pyarrow.dataset.Scanner`` that reads what ``columns`` and ``filter`` need."""
        wanted = list(COLUMNS if columns is None else columns)
        mentioned = set() if filter is None else set(_WORD.findall(str(filter))) & set(COLUMNS)
        read = [name for name in COLUMNS if name in mentioned.union(wanted)]
        files = None
        if mentioned and mentioned <= GROUP_COLUMNS:
            files = self._files(filter)
        schema = pa.schema([SCHEMA.field(name) for name in read])
        reader = pa.RecordBatchReader.from_batches(schema, self._scan.batches(read, files))
        return arrow_dataset.Scanner.from_batches(reader, columns=wanted, filter=filter, use_threads=False)

    def _files(self, condition: Any) -> list[int]:
        counted = self._scan.counted
        groups = counted.table().append_column("position", pa.array(range(len(counted.group_id)), pa.int64()))
        found = groups.filter(condition)["position"].to_numpy()
        return [int(number) for number in sorted(set(counted.file[found].tolist()))]
