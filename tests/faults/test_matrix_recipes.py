"""Recipes at the edge of what is allowed, and recipes that change between two starts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from broken_runs import STOPPED_SETTINGS, check_clear, check_sound, content, copied
from command import QUICK, check_equal, events, milesbatch

from milesbatch.errors import RecipeError
from milesbatch.recipe.load import load_recipe

SMALL = ("trainer.ranks=1", "rollout.workers=1", "steps=3")


def flags(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def trained(tmp_path: Path, cache: Path, *settings: str) -> tuple[Path, list[dict[str, Any]]]:
    """A short run, and the figures of its steps."""
    run = tmp_path / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, *flags(*SMALL, *settings), cache=cache)
    assert ended.code == 0, ended.err
    assert " died " not in ended.err
    assert check_sound(run, cache)["groups"]["trained"] == 24
    figures = [event["metrics"] for event in events(run, "trainer-0", "train_step")]
    assert len(figures) == 3 and all(math.isfinite(value) for step in figures for value in step.values())
    return run, figures


def rows(run: Path) -> list[dict[str, Any]]:
    return [
        row for path in (run / "trajectories").iterdir() for row in pa.ipc.open_file(str(path)).read_all().to_pylist()
    ]


BF16 = ("trainer.dtype=bfloat16", "weights.dtype=bfloat16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("estimator", "others"),
    [
        ("k1", (*BF16, "algorithm.entropy_coef=0.01")),
        ("k2", ("trainer.gradient_checkpointing=true",)),
        ("k3", ("algorithm.normalize_advantage=false",)),
    ],
)
def test_a_reference_model_and_other_types(
    tmp_path: Path, cache: Path, estimator: str, others: tuple[str, ...]
) -> None:
    kl = ("algorithm.kl_coef=0.1", f"algorithm.kl_estimator={estimator}")
    run, figures = trained(tmp_path, cache, *kl, *others)
    assert abs(figures[0]["kl"]) < abs(figures[2]["kl"]), "it moves away from where it began"
    manifest = json.loads((run / "weights" / "000003" / "manifest.json").read_text())
    assert {tensor["dtype"] for tensor in manifest["tensors"]} == {"BF16" if others[:2] == BF16 else "F32"}


ALONE = (
    "temperature=0",
    "temperature=1e-6",
    "temperature=1e30",
    "top_k=1",
    "top_k=1000000",
    "top_p=1e-9",
    "max_new_tokens=1",
)
TOGETHER = ("temperature=0", "top_k=1", "top_p=1e-9", "max_new_tokens=1")


@pytest.mark.long
@pytest.mark.parametrize("extremes", [TOGETHER, *((one,) for one in ALONE)], ids=",".join)
def test_sampling_at_its_edges(tmp_path: Path, cache: Path, extremes: tuple[str, ...]) -> None:
    run, figures = trained(tmp_path, cache, *(f"rollout.sampling.{one}" for one in extremes))
    groups: dict[int, set[tuple[int, ...]]] = {}
    for row in rows(run):
        groups.setdefault(row["group_id"], set()).add(tuple(row["tokens"]))
        assert all(math.isfinite(value) and value <= 0 for value in row["logprobs"])
    if not {"temperature=1e30", "top_k=1000000"} & set(extremes) and extremes != ("max_new_tokens=1",):
        assert all(len(samples) == 1 for samples in groups.values()), "every draw takes the likeliest token"
        assert all(step["grad_norm"] == 0 for step in figures), "equal samples teach nothing"
    if "max_new_tokens=1" in extremes:
        assert all(row["response_tokens"] == 1 for row in rows(run))


@pytest.mark.parametrize("value", ["1e-300", "1e-7", "-1", ".nan", ".inf"])
def test_a_temperature_that_nothing_can_be_divided_by(value: str) -> None:
    with pytest.raises(RecipeError, match=r"rollout\.sampling\.temperature"):
        load_recipe(QUICK, [f"rollout.sampling.temperature={value}"])


# -- changes between two starts -------------------------------------------------------------------------------------


@pytest.mark.long
def test_another_number_of_workers_is_honoured(stopped: Path, unbroken: Path, cache: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path / "run")
    settings = (*STOPPED_SETTINGS, *flags("rollout.workers=3"))
    ended = milesbatch("run", QUICK, "--run-dir", run, *settings, cache=cache)
    assert ended.code == 0, ended.err
    record = json.loads((run / "incarnations" / "000002.json").read_text())
    assert record["recipe_changes"] == {"rollout.workers": 3, "slurm.max_restarts_without_progress": 3}
    started = {e["name"] for e in events(run, "controller-0", "process_started") if e["incarnation"] == 2}
    assert started == {"trainer-0", "trainer-1", "rollout-0", "rollout-1", "rollout-2"}
    check_equal(run, unbroken)
    check_sound(run, cache)


def test_what_would_change_the_arithmetic_is_refused(stopped: Path, cache: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path / "run")
    before = content(run)
    changed = {"trainer.ranks": 1, "trainer.threads": 2, "rollout.threads": 2, "rollout.sampling.top_k": 3}
    settings = (*STOPPED_SETTINGS, *flags(*(f"{key}={value}" for key, value in changed.items())))
    ended = milesbatch("run", QUICK, "--run-dir", run, *settings, cache=cache)
    check_clear(ended, 2, *(f"{key}: " for key in changed), "may not change in this run")
    assert content(run) == before
