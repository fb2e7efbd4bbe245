"""A run whose old weights were retired: what tools say of it, and how it goes on when all that was kept is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command import QUICK, digests, events, fates, milesbatch


def retired(run: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in (run / "weights").glob("*/retired.json"))


def test_old_weights_go_and_tools_go_on_working(unbroken: Path, cache: Path, tmp_path: Path) -> None:
    """Checkpoints 6 and 8 are kept, and keyframe 4 is the newest that a start from 6 can do with."""
    assert retired(unbroken) == [0, 1, 2, 3]
    assert not list((unbroken / "weights").glob("00000[0-3]/*.safetensors"))
    assert [event["base"] for event in events(unbroken, "trainer-0", "weights_retired")] == [4]
    assert len(digests(unbroken)) == 9
    listed = json.loads(milesbatch("weights", "ls", unbroken, "--json", cache=cache).out)
    assert [row["retired"] for row in listed] == [True] * 4 + [False] * 5
    assert milesbatch("audit", unbroken, cache=cache).code == 0
    ended = milesbatch("weights", "materialize", unbroken, "--version", "2", "-o", tmp_path / "model", cache=cache)
    assert ended.code == 1
    assert "version 2 was retired" in ended.err and "(4 to 8)" in ended.err


def test_a_run_that_lost_all_checkpoints_replays_past_its_retired_weights(
    unbroken: Path, cache: Path, tmp_path: Path
) -> None:
    """Lost too is a file of step 3: its groups must be made again by version 1, whose payload was retired."""
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
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
    assert retired(run) == [0, 1, 2, 3], "published again for the replay, and retired again after it"
