"""A run with evaluation: the same training bit for bit, whatever happens to its evaluator; and evaluation by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command import QUICK, Command, digests, events, milesbatch, status, wait_until

SUMS = Path(__file__).parents[2] / "milesbatch" / "environments" / "shipped_prompts"


def write_recipe(place: Path, name: str, evaluation: str) -> Path:
    """The quick recipe on 80 sums; 20 are held out."""
    path = place / f"{name}.yaml"
    path.write_text(
        f"extends: {QUICK}\nname: {name}\n"
        f"data: {{kind: file, path: {SUMS / 'single-digit-sums-training.jsonl'}, id_field: id}}\n{evaluation}"
    )
    return path


EVALUATION = (
    f"evaluation:\n  prompts: {{kind: file, path: {SUMS / 'single-digit-sums-held-out.jsonl'}, id_field: id}}\n"
    "  every_steps: 4\n"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The same training without evaluation, undisturbed."""
    place = tmp_path_factory.mktemp("plain")
    ended = milesbatch("run", write_recipe(place, "plain", ""), "--run-dir", place / "run", cache=cache)
    assert ended.code == 0, ended.err
    return place / "run"


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The run with evaluation; its evaluator is killed when all answers of its second evaluation are there, unwritten."""
    place = tmp_path_factory.mktemp("evaluated")
    plan = place / "faults.yaml"
    plan.write_text(
        "faults:\n  - {name: evaluator, role: evaluation-0, point: evaluation.generated, nth: 2, action: kill}\n"
    )
    recipe = write_recipe(place, "evaluated", EVALUATION)
    ended = milesbatch("run", recipe, "--run-dir", place / "run", cache=cache, faults=plan)
    assert ended.code == 0, ended.err
    (place / "stderr.txt").write_text(ended.err)
    return place / "run"


def records(run: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sorted(run.glob("evaluations/*/*.json")):
        body = json.loads(path.read_text())
        assert body["version"] not in found, "evaluated twice"
        found[body["version"]] = body
    return found


@pytest.mark.long
def test_evaluation_changes_no_bit_of_the_training(plain: Path, disturbed: Path) -> None:
    assert digests(disturbed) == digests(plain)


def test_a_killed_evaluator_is_replaced_and_makes_what_is_missing_once(disturbed: Path) -> None:
    deaths = [end for end in events(disturbed, "controller-0", "process_ended") if end["name"] == "evaluation-0"]
    assert [end["exit_code"] for end in deaths] == [-signal.SIGKILL, 0]
    assert "evaluation-0 died (killed by SIGKILL); started again" in (disturbed.parent / "stderr.txt").read_text()
    made = records(disturbed)
    assert sorted(made) == [0, 4, 8]
    committed = [event["version"] for event in events(disturbed, "evaluation-0", "evaluation_committed")]
    assert committed == [0, 4, 8]
    started = [event["version"] for event in events(disturbed, "evaluation-0", "evaluation_started")]
    assert started == [0, 4, 4, 8]
    assert [made[version]["weights_digest"] for version in (0, 4, 8)] == [digests(disturbed)[v] for v in (0, 4, 8)]
    for version, body in made.items():
        (path,) = disturbed.glob(f"evaluations/{version:06d}/*.arrow")
        table = pa.ipc.open_file(str(path)).read_all()
        assert table.num_rows == body["figures"]["samples"] == 20
        assert {row["role"] for row in table["messages"][0].as_py()} == {"user", "assistant"}
    (dead,) = [
        event["pid"]
        for event in events(disturbed, "controller-0", "process_started")
        if event["name"] == "evaluation-0"
    ][:1]
    assert [path.name.split("-")[-2] for path in (disturbed / "holds").iterdir()] in ([str(dead)], []), (
        "its hold goes stale"
    )


def test_the_run_with_evaluations_is_sound_and_its_groups_are_those_of_training(disturbed: Path, cache: Path) -> None:
    ended = milesbatch("audit", disturbed, "--json", cache=cache)
    body = json.loads(ended.out)
    assert ended.code == 0 and body["violations"] == [] and body["notes"] == []
    assert body["evaluations"] == 3
    assert body["groups"] == {"trained": 64, "rejected": 0, "pending": 0, "lost": 0, "repeated": 0}
    assert body["trajectories"] == 256


def test_it_is_seen_everywhere(disturbed: Path, cache: Path) -> None:
    found = status(disturbed, cache)["evaluation"]
    assert (found["version"], found["versions"]) == (8, 3)
    said = (disturbed.parent / "stderr.txt").read_text()
    assert "held-out reward: " in said and f"{found['reward_mean']:.3f} at version 8" in said
    shown = milesbatch("traj", "show", disturbed, "--worst", "1", "--evaluation", "8", cache=cache)
    assert shown.code == 0 and "weights" in shown.out
    page = disturbed.parent / "report.html"
    assert milesbatch("report", disturbed, "-o", page, "--no-audit", cache=cache).code == 0
    assert "that training never asks" in page.read_text()


@pytest.mark.long
def test_by_hand_only_what_is_missing_is_made_and_it_is_what_the_run_would_have_made(
    disturbed: Path, cache: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(disturbed, tmp_path / "run"))
    before = records(run)
    for path in (run / "evaluations" / "000008").iterdir():
        path.unlink()
    ended = milesbatch("evaluate", run, "--json", cache=cache)
    assert ended.code == 0, ended.err
    assert ended.err.count("evaluating policy version") == 1
    (curve,) = json.loads(ended.out)["curves"]
    assert [point["version"] for point in curve["points"]] == [0, 4, 8]
    after = records(run)
    assert after[8]["figures"] == before[8]["figures"]
    assert [after[version] for version in (0, 4)] == [before[version] for version in (0, 4)]
    listed = milesbatch("evaluate", run, "--list", "--json", cache=cache)
    assert json.loads(listed.out)["curves"] == [curve]
    other = tmp_path / "hard.jsonl"
    other.write_text('{"prompt": "12+9=", "answer": "21"}\n')
    ended = milesbatch("evaluate", run, "--version", "8", "--prompts", other, "--json", cache=cache)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["curves"][0]["name"] == "hard"
    assert milesbatch("audit", run, cache=cache).code == 0


def test_prompts_of_the_training_are_refused_before_anything_begins(cache: Path, tmp_path: Path) -> None:
    wrong = EVALUATION.replace("held-out", "training")
    ended = milesbatch("run", write_recipe(tmp_path, "wrong", wrong), "--run-dir", tmp_path / "run", cache=cache)
    assert ended.code == 2
    assert "80 of 80 evaluation prompts are asked in training too" in ended.err and "Traceback" not in ended.err
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.long
def test_following_another_process_evaluates_what_the_run_publishes(cache: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "followed", "")
    held_out = SUMS / "single-digit-sums-held-out.jsonl"
    running = Command("run", recipe, "--run-dir", tmp_path / "run", cache=cache)
    wait_until(lambda: (tmp_path / "run" / "incarnations" / "000001.json").exists(), "the run begins")
    words = ("evaluate", tmp_path / "run", "--follow", "--every", "4", "--prompts", held_out, "--json")
    following = Command(*words, cache=cache)
    assert running.wait().code == 0
    ended = following.wait()
    assert ended.code == 0, ended.err
    (curve,) = json.loads(ended.out)["curves"]
    assert [point["version"] for point in curve["points"]] == [0, 4, 8]
    assert milesbatch("audit", tmp_path / "run", cache=cache).code == 0


def test_an_evaluator_that_is_killed_at_any_time_leaves_nothing_half(
    disturbed: Path, cache: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(disturbed, tmp_path / "run"))
    shutil.rmtree(run / "evaluations")
    by_hand = Command("evaluate", run, "--every", "1", cache=cache)
    wait_until(lambda: len(records(run)) >= 2, "two versions are evaluated")
    os.kill(by_hand.process.pid, signal.SIGKILL)
    by_hand.wait()
    done = records(run)
    assert milesbatch("audit", run, cache=cache).code == 0
    ended = milesbatch("evaluate", run, "--every", "1", "--json", cache=cache)
    assert ended.code == 0, ended.err
    assert sorted(records(run)) == list(range(9))
    assert {version: records(run)[version] for version in done} == done
