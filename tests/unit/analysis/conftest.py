"""Runs to ask questions of, made with the project's writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis_runs import reject, varied_sample, write_samples
from builders import commit_batch, grow, make_run, past_incarnation, write_groups

from milesbatch.records import GroupRef
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.groups import group_refs


@pytest.fixture
def lives(tmp_path: Path) -> RunLayout:
    """Two incarnations. Steps 1..3 of four groups are of the first, which also left groups 12, 13 waiting; they are
    sealed. After that it wrote 14, 15 and 16, 17, which does not count; incarnation 2 made 14..19 and recorded step 4
    with 12..15, of which it rejected 13. 18, 19 are in two files of it."""
    layout = make_run(tmp_path / "run")
    assert past_incarnation(layout) == 1
    grow(layout, 3)
    write_groups(layout, [12, 13], version=2)
    assert past_incarnation(layout) == 2
    waiting = {ref.group_id: ref for path in layout.trajectories.glob("000012-*") for ref in group_refs(path)}
    write_groups(layout, [14, 15], version=1, worker="rollout-9")
    write_groups(layout, [16, 17], version=1, worker="rollout-9")
    made = {ref.group_id: ref for ref in write_groups(layout, [14, 15], version=3, incarnation=2)}
    write_groups(layout, [16, 17], version=3, incarnation=2)
    write_groups(layout, [18, 19], version=3, incarnation=2)
    write_groups(layout, [18, 19], version=3, incarnation=2, worker="rollout-1")
    trained = [waiting[12], made[14], made[15]]
    commit_batch(layout, 4, trained, 2, [reject(waiting[13], "zero_variance")])
    return layout


@pytest.fixture
def varied(tmp_path: Path) -> RunLayout:
    """One incarnation, two steps: rewards, lengths, ends and failures differ; group 5 waits."""
    layout = make_run(tmp_path / "varied")
    assert past_incarnation(layout) == 1
    refs: list[GroupRef] = []
    for group in range(6):
        refs += write_samples(layout, [varied_sample(group, index) for index in range(4)])
    commit_batch(layout, 1, refs[:2], 1, [reject(refs[2], "stale")])
    commit_batch(layout, 2, refs[3:5])
    return layout
