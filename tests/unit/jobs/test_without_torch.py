"""A login node has the base dependencies and nothing else: what people do there works without torch.

The commands run in processes of their own, in which every package that is no base dependency of this project (nor needed by
one) cannot be imported, as if it were not installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from builders import grow, make_recipe, make_run, past_incarnation
from packaging.requirements import Requirement
from prepared_slurm import PreparedSlurm

sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))

from audit_runs import sound_run

from milesbatch.jobs.order import place_order, write_order
from milesbatch.recipe.site import Site
from milesbatch.store.layout import RunLayout

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "transformers", "safetensors", "psutil", "mlflow", "reasoning_gym", "accelerate", "gguf")
_BLOCK = """
import sys

BLOCKED = {blocked!r}


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)


sys.meta_path.insert(0, NotInstalled())
"""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str]) -> set[str]:
    """Distributions that installing ``requirements`` brings, extras left out."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = plain(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            metadata = distribution(name)
        except PackageNotFoundError:
            continue
        found.add(name)
        waiting += [Requirement(text) for text in metadata.requires or ()]
    return found


BASE = needed(PROJECT["dependencies"])
BLOCKED = {
    module
    for module, names in packages_distributions().items()
    if not any(plain(name) in BASE or plain(name) == "milesbatch" for name in names)
}


@pytest.fixture
def login_node(tmp_path: Path) -> dict[str, str]:
    """Environment of a process there."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_BLOCK.format(blocked=BLOCKED))
    slurm = PreparedSlurm(tmp_path / "slurm")
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MILESBATCH"))}
    return {**kept, "PATH": str(slurm.path), "PYTHONPATH": str(tmp_path / "site"), "HOME": str(home), "COLUMNS": "200"}


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """A run of six steps that was submitted, and whose controller is gone."""
    layout = make_run(tmp_path / "run")
    assert past_incarnation(layout) == 1
    grow(layout, 6)
    layout.log("trainer-0", 1).write_text("2026-03-01T12:00:00.000000Z step 6 of 8\n")
    recipe = make_recipe(rollout={"workers": 2})
    write_order(place_order(layout, recipe, Site(name="here", python=sys.executable), tmp_path))
    (tmp_path / "small.yaml").write_text(layout.recipe.read_text())
    return layout


def call(environment: dict[str, str], directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "milesbatch.cli.main", *words]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=120)


def test_everything_that_only_compute_nodes_have_is_blocked(login_node: dict[str, str], tmp_path: Path) -> None:
    assert set(HEAVY) <= BLOCKED
    assert not {"pydantic", "yaml", "typer", "numpy", "pyarrow", "submitit", "httpx"} & BLOCKED
    for name in HEAVY:
        done = subprocess.run([sys.executable, "-c", f"import {name}"], env=login_node, capture_output=True, text=True)
        assert done.returncode == 1 and f"No module named '{name}'" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("submit", "small.yaml", "--site", "devcluster", "--dry-run"), "#SBATCH hetjob"),
        (("submit", "small.yaml", "--site", "devcluster", "--run-dir", "new"), "run job 101"),
        (
            ("submit", "small.yaml", "--site", "lumi", "--run-dir", "new", "--set", "slurm.shape=separate"),
            "rollout job 102",
        ),
        (("status", "run"), "step"),
        (("cancel", "run"), "was not running"),
        (("resume", "run"), "run job 101"),
        (("logs", "run"), "step 6 of 8"),
        (("traj", "ls", "run"), "rollout-0"),
        (("traj", "stats", "run"), "reward"),
        (("weights", "ls", "run"), "keyframe"),
        (("recipes", "validate", "small.yaml"), "is valid"),
    ],
    ids=lambda value: "-".join(value[:2]).replace("/", "") if isinstance(value, tuple) else "",
)
def test_people_work_without_torch(
    login_node: dict[str, str], run: RunLayout, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    done = call(login_node, tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout + done.stderr


def test_scaling_asks_slurm_without_torch(login_node: dict[str, str], run: RunLayout, tmp_path: Path) -> None:
    done = call(login_node, tmp_path, "scale", "run", "--rollout", "4")
    assert done.returncode == 2 and "no job of run is queued or running" in done.stderr, done.stderr


def test_machines_work_without_torch_too(login_node: dict[str, str], run: RunLayout, tmp_path: Path) -> None:
    status = json.loads(call(login_node, tmp_path, "status", "run", "--json").stdout)
    assert (status["step"], status["steps"], status["policy_version"]) == (6, 8, 6)


def test_a_run_is_audited_without_torch(login_node: dict[str, str], tmp_path: Path) -> None:
    sound_run(tmp_path / "sound")
    done = call(login_node, tmp_path, "audit", "sound", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True, done.stdout + done.stderr
