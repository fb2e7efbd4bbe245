"""A run whose old weights were retired: what tools say of it, and how it goes on when all that was kept is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import QUICK, check_equal, digests, events, fates, milesbatch

PLAN = "faults: [{name: slow, role: trainer-0, point: trainer.recorded, nth: 8, action: delay, seconds: 3}]"
"""So that the worker has asked for more work, and with that told its newest version, when the last checkpoint is committed."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    directory = tmp_path_factory.mktemp("retired")
    (directory / "plan.yaml").write_text(PLAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILESBATCH_FAULTS", str(directory / "plan.yaml"))
        one_worker = ("--set", "rollout.workers=1")  # of two, one may find no work and hold an old version to the end
        ended = milesbatch("run", QUICK, "--run-dir", directory / "run", *one_worker, cache=cache)
    assert ended.code == 0, ended.err
    return directory / "run"


def retired(run: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in (run / "weights").glob("*/retired.json"))


def test_old_weights_go_and_tools_go_on_working(finished: Path, unbroken: Path, cache: Path, tmp_path: Path) -> None:
    """Checkpoints 6 and 8 are kept, and keyframe 4 is the newest that a start from 6 can do with."""
    check_equal(finished, unbroken)
    assert retired(finished) == [0, 1, 2, 3]
    assert not list((finished / "weights").glob("00000[0-3]/*.safetensors"))
    assert [event["base"] for event in events(finished, "trainer-0", "weights_retired")] == [4]
    listed = json.loads(milesbatch("weights", "ls", finished, "--json", cache=cache).out)
    assert [row["retired"] for row in listed] == [True] * 4 + [False] * 5
    assert milesbatch("audit", finished, cache=cache).code == 0
    ended = milesbatch("weights", "materialize", finished, "--version", "2", "-o", tmp_path / "model", cache=cache)
    assert ended.code == 1
    assert "version 2 was retired" in ended.err and "(4 to 8)" in ended.err


@pytest.mark.long
def test_a_run_that_lost_all_checkpoints_replays_past_its_retired_weights(
    finished: Path, unbroken: Path, cache: Path, tmp_path: Path
) -> None:
    """Lost too is a file of step 3: its groups must be made again by version 1, whose payload was retired."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for shard in (run / "checkpoints").rglob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    (victim,) = (run / "trajectories").glob("000016-000019.*")
    victim.unlink()
    ended = milesbatch("run", QUICK, "--run-dir", run, "--set", "steps=9", cache=cache)
    assert ended.code == 0, ended.err
    assert digests(run)[:9] == digests(unbroken)
    assert {group: fate for group, fate in fates(run).items() if group < 64} == fates(unbroken)
    assert events(run, "trainer-0", "regenerating")[0]["groups"] == [16, 17, 18, 19]
    unreachable = [
        e["version"] for name in ("rollout-0", "rollout-1") for e in events(run, name, "weights_unreachable")
    ]
    assert set(unreachable) == {1}
    assert milesbatch("audit", run, cache=cache).code == 0, milesbatch("audit", run, cache=cache).out
    assert all(not (run / "weights" / f"{v:06d}" / "retired.json").exists() for v in range(4, 9))
