"""The fault matrix is complete, says what its page says, and names tests that exist and are run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from matrix import MATRIX, PROMISES, Row, as_page

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
ROWS = [row for rows in MATRIX.values() for row in rows]
SECTIONS = (
    "While a run is made and taken over",
    "In step k",
    "While unfinished episodes are saved and continued",
    "One process only",
    "Damage",
)
"""Headings of ``docs/protocol.md`` whose tables say what breaks."""


def rows_of_the_protocol() -> set[str]:
    found = set()
    heading, is_first = "", False
    for line in (DOCS / "protocol.md").read_text().splitlines():
        if line.startswith("#"):
            heading, is_first = line.lstrip("# "), True
        elif line.startswith("|") and heading in SECTIONS:
            cell = line.split("|")[1].strip()
            if not is_first and set(cell) != {"-"}:
                found.add(f"{heading}: {cell}")
            is_first = False
    return found


def test_every_row_of_the_protocol_is_in_the_matrix() -> None:
    covered = [name for row in ROWS for name in row.protocol]
    assert len(covered) == len(set(covered)), "a row of the protocol is covered twice"
    found = rows_of_the_protocol()
    assert {name.split(": ")[0] for name in found} == set(SECTIONS)
    assert found - set(covered) == set(), "rows without a test: give each one in matrix.py"
    assert set(covered) - found == set(), "rows that the protocol does not have any more"


def test_every_promise_is_protected() -> None:
    assert {number for row in ROWS for number in row.promises} == set(PROMISES)
    assert all(row.tests and row.promises for row in ROWS)
    assert len({row.fault for row in ROWS}) == len(ROWS)


def test_the_page_shows_the_matrix() -> None:
    page = (DOCS / "faults.md").read_text()
    section = page.partition("## The fault matrix\n")[2].partition("\n## ")[0]
    assert as_page().strip() in section, "docs/faults.md: put in what matrix.as_page() gives"
    for number, promise in PROMISES.items():
        assert f"{number}. **{promise.capitalize()}.**" in section


@cache
def functions(file: str) -> dict[str, list[str]]:
    """Test functions of a module -> their decorators."""
    path = TESTS / file
    assert re.fullmatch(r"test_\w+\.py", path.name), f"{file} is not collected"
    tree = ast.parse(path.read_text())
    return {
        node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_its_tests_exist(row: Row) -> None:
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in functions(file), f"{test} does not exist"
        assert not [text for text in functions(file)[name] if "skip" in text or "xfail" in text], f"{test} is not run"


def test_its_tests_are_collected(collected: frozenset[str]) -> None:
    """As pytest itself sees them: no mark, setting or broken import leaves one out."""
    wanted = {str(TESTS / test) for row in ROWS for test in row.tests}
    seen = {test.partition("::")[0] for test in collected}
    found = set(collected)
    if others := {file for test in wanted if (file := test.partition("::")[0]) not in seen}:
        found |= collect(sorted(others))  # not all tests were asked for
    assert wanted - found == set()


def collect(files: list[str]) -> set[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        *files,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = [line.partition("[")[0] for line in process.stdout.splitlines() if "::" in line]
    return {str(TESTS.parent / line) for line in lines}
