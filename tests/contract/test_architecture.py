"""The architecture page, held by a test over the syntax tree: layers, cycles, and one door for each danger."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "milesbatch"

# Imports point down (to a later line). Peers within a line may import each other's modules, but not in a cycle.
LAYERS = (
    ("cli", "catalogue", "report", "timeline", "analysis", "audit", "drill", "doctor", "jobs", "plan"),
    ("controller",),
    ("evaluation",),
    ("rollout", "trainer"),
    (
        "engines",
        "backends",
        "broadcast",
        "cluster",
        "environments",
        "tracking",
        "models",
        "preparation",
        "role",
        "wire",
        "forks",
    ),
    ("algorithm",),
    ("faults",),
    ("evaluation.figures", "evaluation.reader", "evaluation.writer"),
    ("weights", "trajectories", "store"),
    ("decisions",),
    ("ids", "records", "recipe", "errors", "milesbatch", "faults.points"),
)

# Imports that point up today, each with the reason. A line that is no longer needed fails the test.
POINTS_UP: dict[tuple[str, str], str] = {}

# Modules that import each other, one of the two inside a function: a factory and the streams that it makes.
LAZY_CYCLES = {
    ("environments.prompts", "environments.arithmetic"),
    ("environments.prompts", "environments.files"),
    ("environments.prompts", "environments.gym"),
}

WITHOUT_TORCH = (
    "recipe",
    "decisions",
    "store",
    "ids",
    "records",
    "errors",
    "trajectories",
    "catalogue",
    "report",
    "timeline",
    "analysis",
    "evaluation",
    "forks",
    "cli",
    "audit",
    "drill",
    "doctor",
    "jobs",
    "plan",
)

DOORS = {
    "os.fsync": {"store.operations"},
    "os.rename": {"store.operations"},
    "os.replace": {"store.operations"},
    "os.link": {"store.operations"},
    "os.environ": {"cluster.context"},
    "os.getenv": {"cluster.context"},
    "os.putenv": {"cluster.context"},
}
# doctor.child: probes that a broken driver or network may hang need a process of their own with a time limit.
MODULE_DOORS = {
    "subprocess": {
        "cluster.local",
        "cluster.slurm",
        "cluster.steps",
        "preparation",
        "drill.command",
        "drill.on_site",
        "doctor.child",
        "engines.sglang.launch",
    }
}


@cache
def trees() -> dict[str, ast.Module]:
    """Module name without the package -> its syntax tree; the package itself is ``milesbatch``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found[name or "milesbatch"] = ast.parse(path.read_text(), str(path))
    return found


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Modules of the package that are imported; with ``everywhere`` also inside functions and for types only."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "milesbatch")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if node.module and node.module.split(".")[0] == "milesbatch":
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if everywhere or not (for_types or inside):
            nodes.extend(ast.iter_child_nodes(node))


def edges(*, everywhere: bool) -> dict[str, set[str]]:
    modules = trees()
    graph = {}
    for name, tree in modules.items():
        named = {text.removeprefix("milesbatch.") for text in imports(tree, everywhere=everywhere)}
        # `from package import module` is an edge to the module; packages themselves are empty.
        graph[name] = {other for other in named if other in modules and other != name and not is_package(other)}
    return graph


def is_package(module: str) -> bool:
    return (PACKAGE / module.replace(".", "/")).is_dir()


def layer(module: str) -> int:
    top = module.split(".")[0]
    found = [number for number, names in enumerate(LAYERS) if module in names] or [
        number for number, names in enumerate(LAYERS) if top in names
    ]
    assert len(found) == 1, f"{top} has no layer: give it one in the table"
    return found[0]


def test_the_reader_sees_the_package() -> None:
    graph = edges(everywhere=True)
    assert len(graph) > 80
    assert "records" in graph["store.durable"]
    assert {"wire.messages", "controller.hub"} <= graph["controller.server"]


def test_imports_point_down() -> None:
    graph = edges(everywhere=True)
    up = {(name, other) for name, others in graph.items() for other in others if layer(other) < layer(name)}
    assert sorted(up - set(POINTS_UP)) == []
    assert sorted(set(POINTS_UP) - up) == [], "no longer needed: take it out of the table"


@pytest.mark.parametrize("everywhere", [False, True], ids=["at import", "anywhere"])
def test_no_cycles(everywhere: bool) -> None:
    lazy = LAZY_CYCLES if everywhere else set()
    graph = {
        name: {other for other in others if (name, other) not in lazy}
        for name, others in edges(everywhere=everywhere).items()
    }
    while leaves := {name for name, others in graph.items() if not others}:
        graph = {name: others - leaves for name, others in graph.items() if name not in leaves}
    assert graph == {}


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


@pytest.mark.parametrize("door", DOORS)
def test_one_door(door: str) -> None:
    module, attribute = door.split(".")
    found = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if dotted(node) == door:
                found.add(name)
            if isinstance(node, ast.ImportFrom) and node.module == module:
                assert attribute not in [alias.name for alias in node.names], f"{name} imports {door} by name"
            if isinstance(node, ast.Import):
                assert all(alias.asname is None or alias.name != module for alias in node.names), name
    assert found <= DOORS[door]


def test_no_other_way_to_rename() -> None:
    """``Path.rename`` and ``Path.replace`` (one argument; strings take two) and shutil.move are renames too."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and name != "store.operations":
                method, count = node.func.attr, len(node.args)
                if (method in ("rename", "hardlink_to") and count == 1) or dotted(node.func) == "shutil.move":
                    found.append(f"{name}:{node.lineno}")
                if method == "replace" and count == 1 and not node.keywords:
                    found.append(f"{name}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("door", MODULE_DOORS)
def test_one_door_for_processes(door: str) -> None:
    users = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and door in [alias.name for alias in node.names]:
                users.add(name)
            if isinstance(node, ast.ImportFrom) and node.module == door:
                users.add(name)
    assert users <= MODULE_DOORS[door]


def test_paths_of_a_run_are_built_in_one_place() -> None:
    """Nobody spells a directory of a run but the layout."""
    directories = {"incarnations", "trajectories", "batches", "checkpoints", "inflight", "quarantine"}
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if name != "store.layout" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                for side in (node.left, node.right):
                    if isinstance(side, ast.Constant) and str(side.value).split("/")[0] in directories:
                        found.append(f"{name}:{node.lineno}")
    assert found == []


def test_no_handler_catches_everything() -> None:
    """But where user code is called, and where all that is done is to tell others before raising again."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = "" if node.type is None else ast.unparse(node.type)
                goes_on = not isinstance(node.body[-1], ast.Raise)
                if caught in ("", "Exception", "BaseException") and goes_on and name != "environments.judge":
                    found.append(f"{name}:{node.lineno}")
    assert found == []


def test_what_the_login_node_needs_imports_without_torch() -> None:
    names = [f"milesbatch.{n}" for n in trees() if n.split(".")[0] in WITHOUT_TORCH and not n.endswith("__main__")]
    assert len(names) > 40
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'mlflow'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    process = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Two of one name cannot be collected by one process, and which two meet there depends on how they are spread."""
    names = [path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py")]
    assert len(names) > 100
    assert sorted({name for name in names if names.count(name) > 1}) == []
