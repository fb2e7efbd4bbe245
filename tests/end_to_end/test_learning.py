"""The shipped tiny recipe really learns: over several seeds, not in one lucky run."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from command import events, milesbatch

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_mean_reward_rises_clearly_for_every_seed(cache: Path, tmp_path: Path) -> None:
    rises = []
    for seed in (101, 102, 103):
        run = tmp_path / str(seed)
        settings = ["--set", f"seed={seed}", "--set", "tracking.kind=none"]
        ended = milesbatch("run", TINY, "--run-dir", run, *settings, cache=cache)
        assert ended.code == 0, ended.err
        rewards = [event["metrics"]["reward_mean"] for event in events(run, "trainer-0", "train_step")]
        quarter = len(rewards) // 4
        rises.append(statistics.fmean(rewards[-quarter:]) - statistics.fmean(rewards[:quarter]))
    assert min(rises) > 0.05, rises
    assert statistics.fmean(rises) > 0.15, rises
