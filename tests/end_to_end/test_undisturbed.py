"""A run from beginning to end, looked at with the tools that a user has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from command import QUICK, Command, digests, events, fates, milesbatch, status
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

DESIGN_COLUMNS = {
    "group_id", "sample_index", "prompt_id", "messages", "tokens", "loss_mask", "logprobs", "versions", "weights_digest",
    "reward", "rewards", "finish_reason", "turns", "error", "routed_experts", "env", "seed", "worker", "incarnation",
    "started", "ended", "prompt_tokens", "response_tokens",
}  # fmt: skip


def test_the_run_directory_is_complete(unbroken: Path, cache: Path) -> None:
    assert fates(unbroken) == {group: f"trained({group // 8 + 1})" for group in range(64)}
    assert len(digests(unbroken)) == 9
    assert len(set(digests(unbroken))) == 9, "every step must change the weights"
    body = status(unbroken, cache)
    assert body["state"] == "finished"
    assert (body["step"], body["steps"], body["policy_version"], body["last_checkpoint_step"]) == (8, 8, 8, 8)
    assert body["weights_digest"] == digests(unbroken)[-1]
    assert body["incarnation"] == 1
    assert body["restarts"] == []
    assert not list((unbroken / "quarantine").iterdir())
    assert not [path for path in unbroken.rglob(".tmp-*")]


def test_the_command_says_what_happened_and_where_to_look(unbroken: Path) -> None:
    said = (unbroken.parent / "stderr.txt").read_text()
    assert "step 8/8" in said
    assert "finished" in said
    assert f"milesbatch status {unbroken}" in said
    assert "Traceback" not in said


def test_any_trajectory_file_is_read_by_pyarrow_alone(unbroken: Path) -> None:
    for path in (unbroken / "trajectories").glob("*.arrow"):
        assert set(pa.ipc.open_file(str(path)).read_all().schema.names) == DESIGN_COLUMNS


def test_staleness_is_exactly_what_the_recipe_says(unbroken: Path) -> None:
    for path in (unbroken / "trajectories").glob("*.arrow"):
        for row in pa.ipc.open_file(str(path)).read_all().to_pylist():
            expected = max(0, row["group_id"] // 8 + 1 - 1 - 1)
            assert [span["version"] for span in row["versions"]] == [expected]
            assert row["weights_digest"] == digests(unbroken)[expected]


def test_the_trainer_and_the_rollout_agree_on_logprobs_of_the_same_weights(unbroken: Path) -> None:
    first = events(unbroken, "trainer-0", "train_step")[0]
    assert first["metrics"]["lag_mean"] == 0
    assert 0 < first["metrics"]["logprob_difference_mean"] < 1e-4
    assert first["metrics"]["logprob_difference_max"] < 1e-3


def test_a_materialized_version_equals_the_checkpoint(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    ended = milesbatch("weights", "materialize", unbroken, "--version", "6", "-o", tmp_path / "model", cache=cache)
    assert ended.code == 0, ended.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (shards,) = (unbroken / "checkpoints" / "000006").glob("shards.*")
    dcp_to_torch_save(shards, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    flat = {name: value for name, value in _flatten(saved) if isinstance(value, torch.Tensor)}
    for name, parameter in model.named_parameters():
        matches = [value for key, value in flat.items() if key.endswith(name) and key.startswith("model")]
        assert len(matches) == 1, name
        assert torch.equal(matches[0], parameter), name


def _flatten(tree: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in tree.items():
        pairs += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def test_looking_commands_work_and_speak_json(unbroken: Path, cache: Path) -> None:
    for words in (["traj", "ls"], ["traj", "stats"], ["weights", "ls"], ["weights", "verify"]):
        ended = milesbatch(*words, unbroken, "--json", cache=cache)
        assert ended.code == 0, ended.err
        json.loads(ended.out)
    ended = milesbatch("traj", "show", unbroken, "5", cache=cache)
    assert ended.code == 0
    assert "trained(1)" in ended.out


def test_a_recorded_step_is_computed_again_from_the_files_alone(unbroken: Path, cache: Path) -> None:
    before = sorted(unbroken.rglob("*"))
    ended = milesbatch("replay", unbroken, "--step", "8", "--json", cache=cache)
    assert ended.code == 0, ended.err
    body = json.loads(ended.out)
    assert body["ok"]
    assert [row["step"] for row in body["steps"]] == [7, 8]
    assert [row["weights_digest"] for row in body["steps"]] == digests(unbroken)[7:]
    assert sorted(unbroken.rglob("*")) == before, "a replay changes nothing"
    refused = milesbatch("replay", unbroken, "--step", "9", cache=cache)
    assert refused.code == 2
    assert "from 1 to 8" in refused.err


def test_the_same_command_on_a_finished_run_does_nothing(unbroken: Path, cache: Path) -> None:
    before = sorted(path for path in unbroken.rglob("*"))
    ended = milesbatch("run", QUICK, "--run-dir", unbroken, cache=cache)
    assert ended.code == 0
    assert "is finished" in ended.err
    assert sorted(path for path in unbroken.rglob("*")) == before


def test_more_steps_continue_a_finished_run_and_another_seed_is_refused(unbroken: Path, cache: Path) -> None:
    import shutil

    run = unbroken.parent / "longer"
    shutil.copytree(unbroken, run)
    refused = milesbatch("run", QUICK, "--run-dir", run, "--set", "seed=4", cache=cache)
    assert refused.code == 2
    assert "seed: 3 -> 4" in refused.err
    assert "Traceback" not in refused.err
    ended = milesbatch("run", QUICK, "--run-dir", run, "--set", "steps=10", cache=cache)
    assert ended.code == 0, ended.err
    assert digests(run)[:9] == digests(unbroken)
    assert len(digests(run)) == 11


def test_a_second_controller_is_refused_while_the_first_lives(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    first = Command("run", QUICK, "--run-dir", tmp_path / "run", cache=cache)
    try:
        first.child("trainer-0")
        second = milesbatch("run", QUICK, "--run-dir", tmp_path / "run", cache=cache)
        assert second.code == 75
        assert str(first.process.pid) in second.err
    finally:
        first.kill_everything()


def test_the_looking_commands_need_no_torch(unbroken: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from milesbatch.cli.main import app\n"
        f"app(['status', {str(unbroken)!r}], standalone_mode=False)\n"
        f"app(['traj', 'ls', {str(unbroken)!r}], standalone_mode=False)\n"
        f"app(['weights', 'verify', {str(unbroken)!r}], standalone_mode=False)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.long
@pytest.mark.parametrize("closing", ["2>&1 | head -1", ">&- 2>/dev/null", "2>&- <&-"])
def test_a_reader_that_goes_away_does_not_stop_a_run(cache: Path, tmp_path: Path, closing: str) -> None:
    line = f"{sys.executable} -m milesbatch.cli.main run {QUICK} --run-dir {tmp_path / 'run'} --set steps=2 {closing}"
    subprocess.run(["sh", "-c", line], check=True, env={**os.environ, "MILESBATCH_CACHE": str(cache)})
    assert len(digests(tmp_path / "run")) == 3
