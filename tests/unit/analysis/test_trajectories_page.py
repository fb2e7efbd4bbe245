"""``docs/trajectories.md``: every tool answers as ``traj sql`` does, on a run with two lives and files that do not
count."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from analysis_runs import reject, varied_sample, write_samples
from builders import commit_batch, make_run, past_incarnation
from typer.testing import CliRunner

from milesbatch.analysis.scan import ADDED
from milesbatch.analysis.sql import TABLES
from milesbatch.cli import traj
from milesbatch.records import GroupRef
from milesbatch.store.layout import RunLayout

PAGE = Path(__file__).parents[3] / "docs" / "trajectories.md"
TOOLS = ("pyarrow", "duckdb", "polars", "pandas", "datasets")
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^###? (?P<text>.+)$", re.MULTILINE)


@pytest.fixture
def told(tmp_path: Path) -> RunLayout:
    """Groups 0..2 are of step 1 (2 rejected), 3, 4 of step 2; 5 waits and was sealed; 6 is of incarnation 1 after the
    seal, and of incarnation 2; 7 is there twice."""
    layout = make_run(tmp_path / "told")
    assert past_incarnation(layout) == 1
    refs: list[GroupRef] = []
    for group in range(6):
        refs += write_samples(layout, [varied_sample(group, index) for index in range(4)])
    commit_batch(layout, 1, refs[:2], 1, [reject(refs[2], "stale")])
    assert past_incarnation(layout) == 2
    commit_batch(layout, 2, refs[3:5], 2)
    write_samples(layout, [varied_sample(6, index) for index in range(4)])
    for group, worker in ((6, "rollout-0"), (7, "rollout-0"), (7, "rollout-1")):
        rows = [varied_sample(group, index, incarnation=2, worker=worker) for index in range(4)]
        write_samples(layout, rows, incarnation=2)
    return layout


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each section of the page: heading, and its blocks (language, text)."""
    text = PAGE.read_text()
    starts = [(match["text"], match.end()) for match in _HEADING.finditer(text)]
    for (heading, start), (_, end) in zip(starts, [*starts[1:], ("", len(text))], strict=True):
        yield heading, [(block["language"], block["body"]) for block in _BLOCK.finditer(text[start:end])]


def answer_of(command: str, layout: RunLayout) -> list[tuple[Any, ...]]:
    words = shlex.split(command)
    assert words[:4] == ["milesbatch", "traj", "sql", "RUN"], command
    result = CliRunner().invoke(traj.app, ["sql", str(layout.root), words[4], "--json"])
    assert result.exit_code == 0, result.output
    return [tuple(row.values()) for row in json.loads(result.stdout)]


def same(found: Any, expected: list[tuple[Any, ...]]) -> bool:
    rows = [tuple(row) for row in found]
    close = [tuple(pytest.approx(value) if isinstance(value, float) else value for value in row) for row in expected]
    return rows == close


def test_all_tools_agree(told: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"RUN": told.root}
    asked: dict[str, list[tuple[Any, ...]]] = {}
    for heading, blocks in sections():
        commands = [body for language, body in blocks if language == "sh"]
        for tool in TOOLS:
            names.pop(f"{tool}_answer", None)
        for body in (body for language, body in blocks if language == "python"):
            assert "milesbatch" not in body or heading == "In Python, with milesbatch"
            exec(compile(body, str(PAGE), "exec"), names)
        for command in commands:
            asked[heading] = answer_of(command, told)
            for tool in TOOLS:
                assert same(names[f"{tool}_answer"], asked[heading]), (heading, tool, names[f"{tool}_answer"])
    assert len(asked) == 5
    assert asked["How did the reward develop?"] == [
        (1, pytest.approx(0.3214, abs=1e-4)),
        (2, pytest.approx(0.3214, abs=1e-4)),
    ]
    assert asked["Why did episodes fail?"] == [("ValueError", 4)]
    assert asked["How many samples were cut off, and what became of them?"] == [
        ("pending", 12, 0.25),
        ("rejected", 4, 0.25),
        ("trained", 16, 0.25),
    ]
    assert asked["Which responses were the longest?"][0] == (7, 3, 11)


def test_the_page_names_every_table_and_column() -> None:
    text = PAGE.read_text()
    assert not [name for name in (*TABLES, *(field.name for field in ADDED)) if f"`{name}`" not in text]


def test_the_page_names_every_number_of_stats() -> None:
    from milesbatch.analysis.statistics import StepStatistics

    text = PAGE.read_text()
    assert not [name for name in StepStatistics.__slots__ if name != "step" and f"`{name}`" not in text]


def test_the_page_names_every_command() -> None:
    text = PAGE.read_text()
    commands = [command.name for command in traj.app.registered_commands]
    assert len(commands) == 8 and not [name for name in commands if f"traj {name}" not in text]
