"""A run goes on in a directory of its own: with the same recipe bit for bit as its parent would have, with another one not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import QUICK, Command, milesbatch, wait_until

from milesbatch.audit.prove import audit_run
from milesbatch.catalogue.compare import compare
from milesbatch.catalogue.entry import read_entry
from milesbatch.cli.screen import rows
from milesbatch.report.page.make import write_page
from milesbatch.report.status import run_status
from milesbatch.store.layout import RunLayout

LOWER = ("--set", "trainer.optimizer.learning_rate=1e-6")


def digest(run: Path, version: int) -> str:
    found = json.loads((run / "weights" / f"{version:06d}" / "manifest.json").read_text())["weights_digest"]
    assert isinstance(found, str)
    return found


@pytest.fixture(scope="module")
def same(unbroken: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From step 6 on with the same recipe; killed in the middle, and gone on with by the same command."""
    run = tmp_path_factory.mktemp("same") / "fork"
    arguments = ("run", QUICK, "--run-dir", unbroken, "--fork", run, "--fork-step", "6")
    command = Command(*arguments, cache=cache)
    wait_until(lambda: (run / "batches" / "000007.json").exists(), "the fork records its first step")
    command.kill_everything()
    ended = milesbatch(*arguments, cache=cache)
    assert ended.code == 0, ended.err
    assert "incarnation 2" in ended.err
    return run


@pytest.fixture(scope="module")
def lower(unbroken: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From step 6 on with another learning rate, and another number of ranks."""
    run = tmp_path_factory.mktemp("lower") / "fork"
    arguments = ("--fork", run, "--fork-step", "6", "--set", "trainer.ranks=3", *LOWER)
    ended = milesbatch("run", QUICK, "--run-dir", unbroken, *arguments, cache=cache)
    assert ended.code == 0, ended.err
    return run


def test_an_unchanged_fork_is_bit_for_bit_what_its_parent_became(same: Path, unbroken: Path) -> None:
    assert [digest(same, version) for version in (5, 6, 7, 8)] == [digest(unbroken, v) for v in (5, 6, 7, 8)]
    for step in (7, 8):
        ours, theirs = (
            json.loads((run / "batches" / f"{step:06d}.json").read_text())["trained"] for run in (same, unbroken)
        )
        assert [group["content"] for group in ours] == [group["content"] for group in theirs]
    assert not (same / "batches" / "000006.json").exists()


def test_a_fork_with_another_learning_rate_goes_another_way(lower: Path, unbroken: Path) -> None:
    assert digest(lower, 6) == digest(unbroken, 6)
    assert digest(lower, 7) != digest(unbroken, 7)


def test_both_are_sound_and_the_parent_is_too(same: Path, lower: Path, unbroken: Path) -> None:
    for run in (same, lower, unbroken):
        verdict = audit_run(RunLayout(run))
        assert verdict.violations == ()
        assert verdict.groups.lost == verdict.groups.repeated == 0
    assert not list((unbroken / "holds").iterdir())


def test_a_step_of_a_fork_can_be_replayed(lower: Path, cache: Path) -> None:
    ended = milesbatch("replay", lower, "--step", "7", cache=cache)
    assert ended.code == 0, ended.out + ended.err
    assert milesbatch("replay", lower, "--step", "6", cache=cache).code == 2


def test_whose_fork_it_is_is_said_everywhere(lower: Path, unbroken: Path, tmp_path: Path) -> None:
    body, parent = run_status(RunLayout(lower)), run_status(RunLayout(unbroken))
    assert parent["forked_from"] is None
    assert body["forked_from"] == {"run_id": parent["run_id"], "path": str(unbroken), "step": 6}
    assert (body["state"], body["step"], body["steps"]) == ("finished", 8, 8)
    assert ("forked from", f"step 6 of {unbroken} ({parent['run_id']})") in rows(body)
    compared = compare([read_entry(RunLayout(run)) for run in (unbroken, lower)])
    assert compared.recipe == {"trainer.optimizer.learning_rate": (0.0001, 1e-06), "trainer.ranks": (2, 3)}
    assert compared.lineage["parent_run_id"] == (None, parent["run_id"])
    assert compared.lineage["parent_step"] == (None, 6)
    page = tmp_path / "page.html"
    write_page(RunLayout(lower), page, with_audit=False, tell_progress=print)
    text = page.read_text()
    assert "A fork: it began with step 6 of" in text and "trainer.optimizer.learning_rate: 0.0001 → 1e-06" in text


def test_a_start_with_another_recipe_is_refused_and_names_the_fork(unbroken: Path, cache: Path) -> None:
    ended = milesbatch("run", QUICK, "--run-dir", unbroken, *LOWER, cache=cache)
    assert ended.code == 2
    assert "trainer.optimizer.learning_rate: 0.0001 -> 1e-06" in ended.err
    assert "--fork NEW_RUN" in ended.err


def test_a_fork_that_would_train_nothing_or_is_asked_for_wrongly_is_refused(
    unbroken: Path, cache: Path, tmp_path: Path
) -> None:
    ended = milesbatch("run", QUICK, "--run-dir", unbroken, "--fork", tmp_path / "new", cache=cache)
    assert ended.code == 2 and "--set steps=9 or above" in ended.err
    ended = milesbatch("run", QUICK, "--run-dir", unbroken, "--fork-step", "3", cache=cache)
    assert ended.code == 2 and "--fork-step was given without --fork" in ended.err
    assert not (tmp_path / "new").exists()
