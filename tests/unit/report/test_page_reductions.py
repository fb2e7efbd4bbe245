"""What the report makes of a run's figures: fewer points, jumps, panels, lanes, lag, chosen samples."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import commit_batch, flip, make_layout, make_rejection, write_groups

from milesbatch.analysis.jumps import find_jumps
from milesbatch.engines.protocol import VersionSpan
from milesbatch.records import Rejection
from milesbatch.report.page.experience import look_at_experience
from milesbatch.report.page.lanes import lay_lanes
from milesbatch.report.page.made import lag_chart
from milesbatch.report.page.panels import chosen_panels, label_of, smooth
from milesbatch.report.page.samples import read_chosen
from milesbatch.report.page.steps import Steps, collect_steps, fewer
from milesbatch.report.page.words import figure, many, share, size, span
from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import read_evidence
from milesbatch.timeline.slices import ACTIVITIES, Slice, Story
from milesbatch.timeline.troubles import Trouble

# -- steps ------------------------------------------------------------------------------------------------------------


def add_step(layout: RunLayout, incarnation: int, step: int, replayed: bool = False, **figures: Any) -> None:
    body = {"at": f"2026-03-01T12:{step % 60:02d}:00Z", "mono_s": step * 60.0 + incarnation, "event": "train_step"}
    body |= {"step": step, "replayed": replayed, "metrics": figures}
    with open(layout.event_log("trainer-0", incarnation), "a") as stream:
        stream.write(json.dumps(body) + "\n")


def test_the_first_event_of_a_step_counts_and_replays_are_counted(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    add_step(layout, 1, 1, reward_mean=0.5)
    add_step(layout, 1, 2, reward_mean=0.6, loss=float("nan"), odd="text")
    add_step(layout, 2, 2, replayed=True, reward_mean=0.9)
    add_step(layout, 2, 3, reward_mean=0.7, kl=0.1)
    steps = collect_steps(read_evidence(layout, 0))
    assert (steps.step, steps.incarnation, steps.replays) == ([1, 2, 3], [1, 1, 2], [0, 1, 0])
    assert steps.column("reward_mean") == [0.5, 0.6, 0.7] and steps.column("kl") == [None, None, 0.1]
    assert steps.column("nothing") == [None, None, None]
    assert steps.odd == ["step 2: loss is nan, no finite number", "step 2: odd is 'text', no finite number"]
    assert steps.names() == ["reward_mean", "kl"]


def made_steps(count: int) -> Steps:
    numbers: list[float | None] = [None if n % 7 == 0 else float(n) for n in range(1, count + 1)]
    many_steps = list(range(1, count + 1))
    return Steps(many_steps, [60.0 * n for n in many_steps], [1] * count, [0] * count, {"loss": numbers})


@pytest.mark.parametrize(("count", "width"), [(1, 1), (10, 1), (100, 1), (101, 2), (1000, 10), (1001, 11)])
def test_fewer_steps_are_means_of_neighbours(count: int, width: int) -> None:
    steps = made_steps(count)
    few = fewer(steps, 100)
    assert few.width == width and len(few.step) <= 100 and few.step[-1] == count
    assert {len(few.step), len(few.at_s), len(few.incarnation), len(few.replays)} == {len(few.column("loss"))}
    first = [n for n in range(1, min(width, count) + 1) if n % 7]
    assert few.column("loss")[0] == pytest.approx(sum(first) / len(first))


def test_a_mean_of_nothing_is_nothing() -> None:
    steps = Steps([1, 2, 3, 4], [0.0] * 4, [1] * 4, [0] * 4, {"kl": [None, None, 1.0, 3.0]})
    assert fewer(steps, 2).column("kl") == [None, 2.0]


# -- jumps ------------------------------------------------------------------------------------------------------------


def noisy(levels: Sequence[float], noise: float = 0.03) -> list[float | None]:
    chance = random.Random(3)
    return [level + chance.gauss(0, noise) for level in levels]


@pytest.mark.parametrize("jump_at", [100, 333, 900])
@pytest.mark.parametrize("height", [0.3, -0.2])
def test_the_step_of_a_jump_is_found_in_noise(jump_at: int, height: float) -> None:
    values = noisy([0.4 + (height if step >= jump_at else 0.0) for step in range(1, 1001)])
    (jump,) = find_jumps(range(1, 1001), values)
    assert abs(jump.step - jump_at) <= 2 and jump.is_clear and jump.change == pytest.approx(height, abs=0.03)


def test_two_jumps_in_order_of_their_size() -> None:
    values = noisy([0.2 + 0.2 * (s > 200) + 0.4 * (s > 600) for s in range(1, 1001)])
    assert [round(jump.step, -1) for jump in find_jumps(range(1, 1001), values)] == [600, 200]


def test_noise_is_never_called_clear() -> None:
    found = find_jumps(range(1, 1001), noisy([0.5] * 1000))
    assert len(found) == 3 and not any(jump.is_clear for jump in found)


def test_a_slow_rise_is_no_clear_jump() -> None:
    assert not any(jump.is_clear for jump in find_jumps(range(1, 1001), noisy([n / 2000 for n in range(1000)])))


@pytest.mark.parametrize("values", [[], [0.5], [None, None], [0.5, 0.5, 0.5]])
def test_too_few_values_or_none_that_differ(values: list[float | None]) -> None:
    assert find_jumps(range(len(values)), values) == []


def test_short_runs_are_compared_step_by_step_and_gaps_are_left_out() -> None:
    jumps = find_jumps([1, 2, 3, 4], [0.1, None, 0.1, 0.9])
    assert [(jump.step, jump.before, jump.after, jump.window) for jump in jumps] == [(4, 0.1, 0.9, 1)]


# -- panels -----------------------------------------------------------------------------------------------------------


def test_every_figure_has_a_panel_and_none_has_two() -> None:
    names = [
        "loss",
        "ratio_mean",
        "ratio_p99",
        "reward/answer",
        "reward/form",
        "reward_mean",
        "my_own",
        "eval/math",
        "kl",
    ]
    steps = Steps([1, 2], [0.0, 1.0], [1, 1], [0, 0], {name: [1.0, 2.0] for name in names} | {"entropy": [None, None]})
    found = [(panel.title, own) for panel, own in chosen_panels(steps)]
    assert found == [
        ("Evaluation", ["eval/math"]),
        ("Loss", ["loss"]),
        ("KL to the reference", ["kl"]),
        ("Importance ratio", ["ratio_mean", "ratio_p99"]),
        ("Reward by part", ["reward/answer", "reward/form"]),
        ("my_own", ["my_own"]),
    ]


def test_more_figures_than_colours_get_panels_of_their_own() -> None:
    names = [f"reward/{n}" for n in range(9)]
    steps = Steps([1], [0.0], [1], [0], {name: [1.0] for name in names})
    assert [len(own) for _, own in chosen_panels(steps)] == [6, 1, 1, 1]


def test_labels() -> None:
    assert label_of("ratio_max", ["ratio_mean", "ratio_max"]) == "max"
    assert label_of("reward/a_b", ["reward/a_b", "reward/c"]) == "a b"
    assert label_of("train_s", ["train_s", "wait_s"]) == "train s"
    assert label_of("loss", ["loss"]) == "loss"


def test_smoothing_keeps_gaps_and_levels() -> None:
    values: list[float | None] = [1.0] * 50 + [None] + [1.0] * 49
    found = smooth(values)
    assert found[50] is None and {value for value in found if value is not None} == {1.0}


# -- lanes ------------------------------------------------------------------------------------------------------------


def made_story(workers: int, slices: int) -> Story:
    pieces = [
        Slice(f"rollout-{n}", 1, "work", ("generating", "waiting")[s % 2], 2.0 * s, 2.0 * s + 1 + s % 2, f"block {s}")
        for n in range(workers)
        for s in range(slices)
    ]
    return Story(tuple(pieces), (), ((1, 0.0, 2.0 * slices),))


def test_few_slices_are_shown_as_they_are() -> None:
    lanes = lay_lanes(made_story(2, 10), [])
    assert lanes.names == ("run", "rollout-0", "rollout-1") and not lanes.is_reduced and lanes.fine is None
    assert len(lanes.bars["lane"]) == 20 and lanes.bars["text"][0] == "block 0"
    assert (lanes.start_ms, lanes.end_ms) == (0, 20_000)


def test_shares_of_many_slices_add_up_to_the_time_that_was_spent() -> None:
    story = made_story(1, 4000)
    lanes = lay_lanes(story, [], most_bars=100)
    assert lanes.is_reduced and len(lanes.bars["lane"]) < 500
    for activity in ("generating", "waiting"):
        exact = sum(p.end_s - p.start_s for p in story.slices if p.activity == activity)
        rows = zip(*(lanes.bars[name] for name in ("activity", "start", "end", "part")), strict=True)
        shown = sum((end - start) / 1000 * part for what, start, end, part in rows if what == activity)
        assert shown == pytest.approx(exact, rel=0.01)
    assert lanes.fine is not None and len(lanes.fine["start"]) == 4000
    assert {ACTIVITIES[place] for place in lanes.fine["activity"]} == {"generating", "waiting"}


def test_far_too_many_slices_come_as_shares_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milesbatch.report.page.lanes.MOST_FINE", 50)
    assert lay_lanes(made_story(1, 100), [], most_bars=10).fine is None


def test_of_very_many_workers_those_with_troubles_keep_their_lanes() -> None:
    story = made_story(100, 2)
    trouble = Trouble(1.0, 1, "rollout-97", "died", "killed")
    lanes = lay_lanes(story, [trouble])
    assert len(lanes.names) == 25 and lanes.hidden == 76 and "rollout-97" in lanes.names
    assert lanes.names[1:4] == ("rollout-0", "rollout-1", "rollout-2")
    assert lanes.marks == {
        "lane": ["rollout-97"],
        "at": [1000],
        "bad": [True],
        "text": ["rollout-97: killed"],
        "then": [""],
    }


def test_a_trouble_of_somebody_without_a_lane_is_shown_on_the_runs() -> None:
    lanes = lay_lanes(made_story(1, 2), [Trouble(1.0, 1, "run", "stopping", "asked")])
    assert (lanes.marks["lane"], lanes.marks["bad"]) == (["run"], [False])


# -- experience -------------------------------------------------------------------------------------------------------


def test_lag_of_tokens_counts_each_span_by_its_version(tmp_path: Path) -> None:
    """Step 5 trains version 4: tokens of versions 4, 2 and -3 are 0, 2 and (capped) 4 behind."""
    layout = make_layout(tmp_path / "run")
    plain = write_groups(layout, [0, 1], version=4)
    mixed = write_groups(layout, [2], versions=(VersionSpan(2, 0), VersionSpan(3, 2), VersionSpan(4, 4)))
    for step in range(1, 5):
        commit_batch(layout, step, [])
    commit_batch(layout, 5, [*plain, *mixed])
    found = look_at_experience(layout)
    assert found.lag_tokens == {5: [4 * 3 + 2, 0, 2, 0, 2]}
    assert (found.trajectories, found.tokens, found.pending, found.gaps) == (6, 18, 0, [])


def test_rejected_and_pending_groups_are_told_apart(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    (kept, stale) = write_groups(layout, [0, 1])
    write_groups(layout, [7], error="boom: took 3.5 s at 0x7f")
    rejection = Rejection(group_id=1, reason="stale", path=stale.path, digest=stale.digest)
    commit_batch(layout, 1, [kept], rejected=[rejection])
    found = look_at_experience(layout)
    assert found.candidates.is_trained.tolist() == [True, True, False, False] and found.pending == 2
    assert found.causes == {"boom: took # s at #x#f": 2} and found.finish_reasons == {"stop": 6}
    assert found.rejected["stale"] == 1 and found.rejected.total() == 1


def test_damaged_and_missing_files_cost_their_own_rows(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    refs = [*write_groups(layout, [0]), *write_groups(layout, [1])]
    commit_batch(layout, 1, refs, rejected=[make_rejection(9)])
    path = layout.trajectory(refs[0].path)
    path.write_bytes(path.read_bytes()[:200])
    found = look_at_experience(layout)
    assert found.trajectories == 2 and len(found.candidates) == 2
    assert {gap.partition(" ")[0] for gap in found.gaps} == {str(path), str(layout.trajectory("x.arrow"))}


def test_a_file_that_does_not_count_is_not_looked_at(tmp_path: Path) -> None:
    """Two workers generated the group; the batch record names one of the files."""
    layout = make_layout(tmp_path / "run")
    refs = write_groups(layout, [0])
    write_groups(layout, [0], worker="rollout-1", error="lost the race")
    commit_batch(layout, 1, refs)
    found = look_at_experience(layout)
    assert (found.trajectories, found.pending, dict(found.causes)) == (2, 0, {})


def test_very_many_damaged_files_are_counted_in_the_end(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    refs = [ref for group in range(25) for ref in write_groups(layout, [group])]
    commit_batch(layout, 1, refs)
    for ref in refs:
        layout.trajectory(ref.path).unlink()
    gaps = look_at_experience(layout).gaps
    assert len(gaps) == 21 and gaps[-1] == "5 more files of the run's experience cannot be read"


@pytest.mark.parametrize("offset", range(8, 2000, 97))
def test_flipped_bytes_never_end_the_report(tmp_path: Path, offset: int) -> None:
    layout = make_layout(tmp_path / "run")
    refs = write_groups(layout, [0, 1])
    commit_batch(layout, 1, refs)
    flip(layout.trajectory(refs[0].path), offset)
    assert look_at_experience(layout).trajectories in (0, 4)


def test_lag_chart_adds_up_to_one_and_has_a_bearable_number_of_bars() -> None:
    chart = lag_chart("x", {step: [3, 1, 0, 0, step % 2] for step in range(1, 2001)})
    parts = chart["parts"]
    assert len(set(parts["start"])) <= 240 and max(parts["high"]) == pytest.approx(1)
    assert (parts["start"][0], parts["end"][-1]) == (0.5, 2000.5)


# -- samples ----------------------------------------------------------------------------------------------------------


def test_the_samples_of_the_page_are_read_with_their_fates(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    (kept, stale) = write_groups(layout, [0, 1])
    (failed,) = write_groups(layout, [2], error="boom")
    write_groups(layout, [7])
    rejection = Rejection(group_id=1, reason="stale", path=stale.path, digest=stale.digest)
    commit_batch(layout, 1, [kept, failed], rejected=[rejection])
    gaps: list[str] = []
    shown = read_chosen(look_at_experience(layout), gaps)
    told = [(one.choice.kind, one.trajectory.group_id, one.trajectory.sample_index, one.fate_text) for one in shown]
    assert told == [
        ("best", 0, 1, "trained in step 1"),
        ("median", 0, 0, "trained in step 1"),
        ("odd", 2, 0, "trained in step 1"),
    ]
    assert gaps == [] and shown[0].lag_text == "version 0"
    assert shown[2].to_json()["error"] == "boom" and shown[2].to_json()["messages"][1]["content"] == "2"
    assert json.dumps([one.to_json() for one in shown])


def test_a_sample_that_is_gone_meanwhile_is_told_and_left_out(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    refs = [*write_groups(layout, [0]), *write_groups(layout, [1], error="boom")]
    commit_batch(layout, 1, refs)
    found, gaps = look_at_experience(layout), []
    layout.trajectory(refs[1].path).unlink()
    assert [one.choice.kind for one in read_chosen(found, gaps)] == ["best", "median"]
    assert len(gaps) == 1 and refs[1].path in gaps[0]


# -- words ------------------------------------------------------------------------------------------------------------


def test_words() -> None:
    assert [figure(v) for v in (None, 3.0, 0.12345, 1234567.8, -0.5)] == ["–", "3", "0.1235", "1,234,568", "-0.5"]  # noqa: RUF001
    assert [size(v) for v in (0, 999, 1234, 5e9)] == ["0 B", "999 B", "1.23 kB", "5 GB"]
    assert [span(v) for v in (0.04, 59, 61, 7300, 90_000)] == ["0.0 s", "59 s", "1 min 1 s", "2 h 1 min", "1 d 1 h"]
    assert [share(a, b) for a, b in ((0, 0), (1, 3), (1, 50), (1, 1))] == ["–", "33 %", "2.0 %", "100 %"]  # noqa: RUF001
    assert [many(n, "process", "processes") for n in (1, 1200)] == ["1 process", "1,200 processes"]
