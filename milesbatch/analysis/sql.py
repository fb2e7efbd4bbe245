"""SQL over a run's trajectories, groups, batch records, files and evaluations, by DuckDB in memory.

Owns the tables, the limits and the words of errors. Never lets a query read or write any file, change a setting, or
see a variable of this process; what a large query spills goes to a temporary directory of its own. Invariant:
``trajectories`` has exactly one row for each counted trajectory. The page behind it is ``docs/trajectories.md``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from milesbatch.analysis.counted import step_table
from milesbatch.analysis.evaluated import evaluation_table
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.errors import InputError, MilesbatchError, UsageError

TABLES = ("trajectories", "groups", "batches", "files", "evaluations")
MEMORY = "2GB"
_THREADS = min(os.cpu_count() or 1, 8)
"""Few: a login node is for many, and the files are read by one."""
_ALLOWED = ("SELECT", "EXPLAIN", "MULTI")
_BATCH_ROWS = 8192
_POSITION = re.compile(r"\n*^LINE (?P<line>\d+): (?P<text>.*)\n(?P<caret> *\^+) *$", re.MULTILINE)
_DUCKDB_CLASS = re.compile(r"^(Parser|Binder|Catalog|Permission|Invalid Input|Conversion|Out of Range) Error: ")


@dataclass(frozen=True, slots=True)
class Tables:
    """An open connection with the tables of one run."""

    scan: TrajectoryScan
    _connection: Any
    _failure: type[Exception]

    def query(self, sql: str, *, line_offset: int = 0) -> Any:
        """The result as a ``pyarrow.RecordBatchReader``, computed while it is read; :meth:`batches` reads it with
        clear errors.

        ``line_offset`` lines of ``sql`` were put before what the user wrote.

        Raises:
            InputError: the SQL is wrong, is not one query, or reaches for files; with the place.
        """
        kind = self._check(sql, line_offset)
        if kind == "SELECT":
            # Binds the names; a relation, which computes its result only while it is read, does not say the place of an error.
            with self._clear_errors(line_offset + 1):
                self._connection.execute(f"explain\n{sql}")
        with self._clear_errors(line_offset):
            return self._connection.sql(sql).to_arrow_reader(_BATCH_ROWS)

    def batches(self, sql: str, *, line_offset: int = 0) -> tuple[Any, Iterator[Any]]:
        """Schema and record batches of the result of ``sql``; errors as those of :meth:`query`, also while reading."""
        reader = self.query(sql, line_offset=line_offset)
        names = _distinct(reader.schema.names)
        schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
        return schema, self._read(reader, names, line_offset)

    def _read(self, reader: Any, names: list[str], line_offset: int) -> Iterator[Any]:
        while True:
            with self._clear_errors(line_offset):
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    return
            yield batch.rename_columns(names)

    def _check(self, sql: str, line_offset: int) -> str:
        """The kind of the one statement that ``sql`` is."""
        try:
            sql.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the query is not text: {error}", mend="write it in UTF-8") from error
        with self._clear_errors(line_offset):
            statements = self._connection.extract_statements(sql)
        if len(statements) != 1:
            raise InputError(
                f"one query is needed, found {len(statements)} statements",
                mend='for example "select count(*) from trajectories"',
            )
        kind = str(statements[0].type.name)
        if kind not in _ALLOWED:
            raise InputError(
                f"a run is only read: {kind} is not allowed", mend="write a query: select ..., describe trajectories"
            )
        return kind

    @contextmanager
    def _clear_errors(self, line_offset: int) -> Iterator[None]:
        try:
            yield
        except self._failure as error:
            raise _in_words(str(error), line_offset) from error
        except (OSError, ValueError) as error:  # how the reader of Arrow passes on what DuckDB says while it computes
            raise _in_words(str(error), line_offset) from error


@contextmanager
def open_tables(scan: TrajectoryScan, *, memory: str = MEMORY, threads: int = _THREADS) -> Iterator[Tables]:
    """The ``TABLES`` of a run. ``memory`` as DuckDB spells it: ``2GB``.

    Raises:
        UsageError: DuckDB is not installed.
        InputError: ``memory`` is not an amount.
    """
    duckdb = _duckdb()
    with tempfile.TemporaryDirectory(prefix="milesbatch-sql-") as spill:
        connection = duckdb.connect(":memory:", config={"python_enable_replacements": False})
        try:
            _register(connection, scan)
            try:
                _lock(connection, spill, memory, threads)
            except duckdb.Error as error:
                raise InputError(f"not an amount of memory: {memory!r}", mend="for example --memory 4GB") from error
            yield Tables(scan, connection, duckdb.Error)
        finally:
            connection.close()


def where_query(columns: str, where: str, end: str = "") -> tuple[str, int]:
    """A query for the trajectories of a condition, and how many lines come before it."""
    # The condition on lines of its own: its errors keep their column, and its comments do not swallow the bracket.
    return f"select {columns} from trajectories where (\n{where}\n) {end}", 1


def _distinct(names: list[str]) -> list[str]:
    """Names of columns, the second ``x`` as ``x_2``, so that each stays apart where columns are found by name."""
    found: list[str] = []
    for name in names:
        number, new = 1, name
        while new in found:
            number += 1
            new = f"{name}_{number}"
        found.append(new)
    return found


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise UsageError(
            f"SQL needs DuckDB, which cannot be imported ({error})", mend="pip install 'milesbatch[analysis]'"
        ) from error
    return duckdb


def _register(connection: Any, scan: TrajectoryScan) -> None:
    # Imported here: pyarrow.dataset takes long, and every start of the command line imports this module.
    from milesbatch.analysis.dataset import RunDataset

    counted = scan.counted
    connection.register("trajectories", RunDataset(scan))
    connection.register("groups", counted.table())
    connection.register("batches", step_table(counted.steps))
    connection.register("files", counted.file_table())
    connection.register("evaluations", evaluation_table(counted.layout))


def _lock(connection: Any, spill: str, memory: str, threads: int) -> None:
    quoted = {"temp_directory": spill, "memory_limit": memory, "TimeZone": "UTC"}
    for name, value in quoted.items():
        connection.execute(f"set {name} = '{value.replace(chr(39), chr(39) * 2)}'")
    connection.execute(f"set threads = {threads:d}")
    for name in ("autoinstall_known_extensions", "autoload_known_extensions", "enable_external_access"):
        connection.execute(f"set {name} = false")
    connection.execute("set lock_configuration = true")


def _in_words(text: str, line_offset: int) -> MilesbatchError:
    place, shown = "", ""
    position = _POSITION.search(text)
    if position is not None:
        head = len(f"LINE {position['line']}: ")
        column = max(len(position["caret"].rstrip("^")) - head, 0)
        line = max(int(position["line"]) - line_offset, 1)
        place = f" at line {line}, column {column + 1}"
        mark = " " * column + position["caret"].strip()
        shown = f"\n    {position['text']}\n    {mark}"
        text = text[: position.start()]
    said = _DUCKDB_CLASS.sub("", text.strip().partition("\n\n")[0]).replace("\n", "\n  ")
    mend = f"tables: {', '.join(TABLES)}; `describe trajectories` lists the columns"
    if "disabled by configuration" in said or "configuration has been locked" in said:
        mend = "a query reads the tables of the run only; use -o FILE for the result"
    return InputError(f"the query cannot be answered{place}: {said}{shown}", mend=mend)
