"""The documentation runs, and speaks of things that exist.

Convention for ``docs/**/*.md``: a fenced block whose first line is

* ``# run: without milesbatch``: runs with ``RUN`` (a run directory) while importing milesbatch, torch or transformers fails;
* ``# run: with milesbatch``: runs with ``RUN`` and the package;
* ``# file: NAME``: is written to the working directory before the page's blocks run (without that line).

Blocks of a page run in order and share their names. References ``milesbatch/x.py::Name.name`` must resolve.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import AT, evaluate_version, grow, make_run, past_incarnation

from milesbatch.records import (
    BatchRecord,
    CheckpointManifest,
    EvaluationFigures,
    EvaluationRecord,
    EvaluationSettings,
    GroupRef,
    Hold,
    IncarnationRecord,
    Retirement,
    RunRecord,
    Seal,
    Value,
)
from milesbatch.store.events import EventLog
from milesbatch.store.layout import RunLayout

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN_HERE = ("tour.md", "format.md", "protocol.md", "extension.md", "operations.md", "evaluation.md")
STEPS = 3

_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"\A# (?P<kind>run|file): (?P<what>.+)\n")
_REFERENCE = re.compile(r"`(?P<file>milesbatch/[\w/]+\.py)(?:::(?P<name>[\w.]+))?`")
_LINK = re.compile(r"\]\((?P<target>(?!https?:)[^)#]+)")
_WITHOUT = "without milesbatch"
_WITH = "with milesbatch"


def blocks(page: Path) -> Iterator[tuple[str, str, str, int]]:
    """Kind (``run``, ``file`` or nothing), what, text, and first line of each fenced block."""
    text = page.read_text()
    for block in _BLOCK.finditer(text):
        body, line = block["body"], text.count("\n", 0, block.start("body"))
        mark = _MARK.match(body)
        if mark is None:
            yield ("python" if block["language"] == "python" else "", "", body, line)
        else:
            yield mark["kind"], mark["what"], body[mark.end() :], line + 1


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with two incarnations, and the events of the first."""
    layout = make_run(tmp_path_factory.mktemp("docs") / "run")
    assert past_incarnation(layout) == 1
    grow(layout, STEPS)
    evaluate_version(layout, 2)
    trainer, controller = EventLog(layout, "trainer-0", 1), EventLog(layout, "controller-0", 1)
    for step in range(1, STEPS + 1):
        trainer.write("train_step", step=step, replayed=False, weights_digest="", metrics={"reward_mean": step / 8})
    controller.write("finished", step=STEPS)
    trainer.close()
    controller.close()
    assert past_incarnation(layout) == 2
    return layout.root


RUNNING = [page for page in PAGES if any(kind == "run" for kind, *_ in blocks(page))]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_code_in_docs_runs(page: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for kind, what, text, _ in blocks(page):
        if kind == "file":
            (tmp_path / what).write_text(text)
    names: dict[str, object] = {"RUN": run}
    for kind, what, text, line in blocks(page):
        if kind != "run":
            continue
        assert what in (_WITHOUT, _WITH), f"{page}:{line}: unknown mark {what!r}"
        with monkeypatch.context() as patch:
            if what == _WITHOUT:
                for module in ("milesbatch", "torch", "transformers"):
                    patch.setitem(sys.modules, module, None)
            exec(compile("\n" * line + text, str(page), "exec"), names)


def test_recipes_in_docs_are_valid(tmp_path: Path) -> None:
    from milesbatch.recipe.load import load_recipe

    files = [(what, text) for page in PAGES for kind, what, text, _ in blocks(page) if kind == "file"]
    recipes = [what for what, text in files if what.endswith(".yaml") and (tmp_path / what).write_text(text)]
    assert recipes and len(set(recipes)) == len(recipes)
    assert [load_recipe(tmp_path / name).name for name in recipes] == [name.removesuffix(".yaml") for name in recipes]


def test_snippets_find_damage(run: Path, tmp_path: Path) -> None:
    """The verification code of the format page is not a decoration: a flipped bit stops it."""
    import shutil

    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    path = RunLayout(damaged).batch(2)
    path.write_bytes(path.read_bytes().replace(AT.encode(), AT.replace("2026", "2027").encode()))
    names: dict[str, object] = {"RUN": damaged}
    with pytest.raises(AssertionError, match=r"000002\.json is damaged"):
        for kind, _, text, _ in blocks(DOCS / "format.md"):
            if kind == "run":
                exec(text, names)


def test_snippets_know_of_retired_weights(run: Path, tmp_path: Path) -> None:
    import shutil

    layout = RunLayout(Path(shutil.copytree(run, tmp_path / "run")))
    for version in range(3):
        record = Retirement(version=version, incarnation=1, base=3, needed=3, checkpoint=5, staleness=1, created_at=AT)
        layout.weights_retirement(version).write_bytes(record.to_bytes())
        for path in layout.weights_version(version).glob("*.safetensors"):
            path.unlink()
    names: dict[str, object] = {"RUN": layout.root}
    for kind, _, text, _ in blocks(DOCS / "format.md"):
        if kind == "run":
            exec(text, names)


@pytest.mark.parametrize("name", WRITTEN_HERE)
def test_every_python_block_is_run(name: str) -> None:
    unmarked = [line for kind, _, _, line in blocks(DOCS / name) if kind == "python"]
    assert not unmarked, f"docs/{name}: python blocks without a mark at lines {unmarked}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_into_the_code_resolve(page: Path) -> None:
    wrong = []
    for reference in _REFERENCE.finditer(page.read_text()):
        path = ROOT / reference["file"]
        if not path.is_file() or not (reference["name"] is None or _defines(path, reference["name"])):
            wrong.append(reference[0])
    assert not wrong, f"{page.name}: {wrong}"


def _defines(path: Path, dotted: str) -> bool:
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in dotted.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("name", [*WRITTEN_HERE, "dependencies.md"])
def test_links_between_pages_resolve(name: str) -> None:
    targets = {link["target"] for link in _LINK.finditer((DOCS / name).read_text())}
    assert not [target for target in targets if not (DOCS / target).exists()]


# -- nothing on disk is left out ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        RunRecord,
        IncarnationRecord,
        Seal,
        BatchRecord,
        GroupRef,
        CheckpointManifest,
        EvaluationRecord,
        EvaluationSettings,
        EvaluationFigures,
        Retirement,
        Hold,
    ],
)
def test_format_page_names_every_field(kind: type[Value]) -> None:
    text = (DOCS / "format.md").read_text()
    assert not [field for field in kind.model_fields if f"`{field}`" not in text]


def test_format_page_names_every_event() -> None:
    written: set[str] = set()
    for path in (ROOT / "milesbatch").rglob("*.py"):
        written |= set(re.findall(r"events\.write\(\s*\"(\w+)\"", path.read_text()))
    assert len(written) > 8, "the pattern no longer finds the events"
    text = (DOCS / "format.md").read_text()
    assert not [event for event in sorted(written) if f"`{event}`" not in text]


def test_operations_page_names_every_status_key(run: Path) -> None:
    from milesbatch.report.status import run_status

    text = (DOCS / "operations.md").read_text()
    assert not [key for key in run_status(RunLayout(run)) if f"`{key}`" not in text]


def test_operations_page_names_every_field_that_may_change() -> None:
    from milesbatch.recipe.freeze import MAY_CHANGE

    text = (DOCS / "operations.md").read_text()
    assert not [name for name in MAY_CHANGE if f"`{name + '*' if name.endswith('.') else name}`" not in text]


def test_dependencies_page_names_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for group in project["optional-dependencies"].values() for name in group),
    ]
    names = [re.split(r"[<>=\[;~! ]", entry)[0] for entry in wanted]
    text = (DOCS / "dependencies.md").read_text()
    assert not [name for name in names if f"`{name}`" not in text]
