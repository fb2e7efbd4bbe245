"""Statistics agree with plain arithmetic, tallies stay small and right, and the right samples are chosen."""

from __future__ import annotations

import statistics as plain_statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from builders import flip, make_run, past_incarnation
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.analysis.choose import Candidates, choose, choose_samples
from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.listing import list_files, read_samples
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.analysis.statistics import OTHER_CAUSES, _Moments, _Words, run_statistics
from milesbatch.analysis.tally import Tally
from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.store.layout import RunLayout


def scan_of(layout: RunLayout) -> TrajectoryScan:
    return TrajectoryScan(count_groups(layout))


def test_statistics_are_those_of_plain_arithmetic(varied: RunLayout) -> None:
    scan = scan_of(varied)
    rows = scan.table(["step", "fate", "reward", "response_tokens", "error", "finish_reason"]).to_pylist()
    steps, whole = run_statistics(scan)
    assert [step.step for step in steps] == [1, 2]
    for step in steps:
        mine = [row for row in rows if row["step"] == step.step]
        good = [row for row in mine if row["fate"] == "trained" and row["error"] is None]
        rewards = [row["reward"] for row in good]
        assert step.reward_mean == pytest.approx(plain_statistics.fmean(rewards))
        assert step.reward_std == pytest.approx(plain_statistics.pstdev(rewards))
        assert (step.reward_min, step.reward_max) == (min(rewards), max(rewards))
        assert step.length_mean == pytest.approx(plain_statistics.fmean(row["response_tokens"] for row in good))
        assert step.length_max == max(row["response_tokens"] for row in good)
        assert step.failed == sum(row["error"] is not None for row in mine)
        assert step.finish_reasons == Counter(row["finish_reason"] for row in mine)
        assert (step.samples, step.response_tokens) == (len(mine), sum(row["response_tokens"] for row in mine))
    assert (steps[0].trained, steps[0].rejected, steps[0].rejected_by_reason) == (2, 1, {"stale": 1})
    assert [step.staleness_mean for step in steps] == [0.0, 1.0]
    assert (whole.trajectories, whole.failed) == (24, 3)
    assert whole.failed_by_cause == {"ValueError: # is no '...' (/home/a/rewards.py:13)": 3}
    assert whole.length.quantile(0.5) == plain_statistics.median_low(
        row["response_tokens"] for row in rows if row["error"] is None
    )


def test_statistics_of_nothing(varied: RunLayout) -> None:
    for path in varied.trajectories.iterdir():
        flip(path, 100)
    scan = scan_of(varied)
    steps, whole = run_statistics(scan)
    assert [(step.reward_mean, step.length_max, step.tokens_per_s, step.trained) for step in steps] == [
        (None, None, None, 2),
        (None, None, None, 2),
    ]
    assert (whole.trajectories, whole.seconds, whole.reward.quantile(0.5)) == (0, None, None)
    assert len(scan.errors) == 6


def test_an_empty_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    layout = make_run(tmp_path_factory.mktemp("empty") / "run")
    past_incarnation(layout)
    scan = scan_of(layout)
    assert run_statistics(scan)[0] == [] and list_files(scan.counted) == ([], [])
    assert choose_samples(scan, best=3, worst=3, median=1, odd=5) == []


def test_moments_of_many_batches_are_those_of_one() -> None:
    """Rewards far from zero with a small spread, which sums of squares get wrong."""
    random = np.random.default_rng(0)
    values, steps = 1e9 + random.random(10_000), random.integers(0, 3, 10_000)
    moments = _Moments(4)
    for part in range(0, 10_000, 777):
        moments.add(steps[part : part + 777], values[part : part + 777])
    for step in range(3):
        mean, spread, low, high = moments.of(step)
        mine = values[steps == step]
        assert mean == pytest.approx(mine.mean(), rel=1e-12) and spread == pytest.approx(mine.std(), rel=1e-5)
        assert (low, high) == (mine.min(), mine.max())
    assert moments.of(3) == (None, None, None, None)


def test_words_beyond_the_limit_are_counted_together() -> None:
    import pyarrow as pa

    words = _Words(1, most=2)
    words.add(np.zeros(4, np.int64), pa.array(["a", "b", "c", "d"]))
    words.add(np.zeros(2, np.int64), pa.array(["c", "a"]))
    assert words.of(0) == {"a": 2, "b": 1, OTHER_CAUSES: 3} == words.all()


# -- tallies ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_few_values_are_exact(values: list[float]) -> None:
    tally = Tally()
    for value in values:
        tally.add([value])
    assert tally.width == 0 and tally.count == len(values)
    assert dict(zip(tally.values.tolist(), tally.counts.tolist(), strict=True)) == Counter(values)
    ordered = sorted(values)
    assert (tally.quantile(0), tally.quantile(1)) == (ordered[0], ordered[-1])
    assert sum(count for _, _, count in tally.bins()) == len(values)
    assert all(low <= high for low, high, _ in tally.bins())


def test_many_values_stay_small_and_close() -> None:
    random, tally = np.random.default_rng(0), Tally()
    values = np.concatenate([random.normal(0, 1, 50_000), random.normal(1000, 1, 50_000)])
    for part in np.split(values, 100):
        tally.add(part)
    assert len(tally.values) <= 4096 and tally.count == 100_000
    for share in (0.05, 0.25, 0.5, 0.9):
        assert tally.quantile(share) == pytest.approx(
            np.quantile(values, share, method="inverted_cdf"), abs=tally.width
        )
    assert 0 < tally.width < 1
    assert sum(count for _, _, count in tally.bins()) == 100_000


def test_bins_of_whole_numbers_are_whole() -> None:
    tally = Tally()
    tally.add(np.arange(1, 101))
    assert tally.bins(10)[0] == (1.0, 10.0, 10) and tally.bins(10)[-1] == (91.0, 100.0, 10)


# -- choice -----------------------------------------------------------------------------------------------------------


def chosen(layout: RunLayout, **numbers: int) -> list[tuple[str, int, int]]:
    return [(one.kind, one.group_id, one.sample_index) for one in choose_samples(scan_of(layout), **numbers)]


def test_choice_by_reward(varied: RunLayout) -> None:
    assert chosen(varied, step=2, best=2, worst=2) == [("best", 4, 3), ("best", 3, 2), ("worst", 3, 0), ("worst", 4, 0)]
    assert chosen(varied, step=1, median=1) == [("median", 2, 1)]
    assert chosen(varied, best=1) == [("best", 4, 3)], "of equal rewards the one of the later step"
    everything = chosen(varied, step=1, best=100, worst=100, median=100, odd=100)
    assert len(everything) == len({(group, sample) for _, group, sample in everything}) == 12


def test_odd_ones_say_why(varied: RunLayout) -> None:
    odd = choose_samples(scan_of(varied), step=1, odd=5)
    assert [(one.why, one.group_id, one.sample_index) for one in odd] == [
        ("the last episode that failed", 1, 3),
        ("longest response", 2, 3),
        ("shortest response", 0, 0),
        ("cut off at the length limit; the highest reward of those", 0, 2),
        ("alone in succeeding: furthest above the other samples of its group", 0, 3),
    ]


def candidates(
    *rows: tuple[int, int, int, float, int], failed: Sequence[int] = (), cut: Sequence[int] = ()
) -> Candidates:
    """Each: step, group, sample, reward, length; all of them trained."""
    steps, groups, samples, lengths = (np.array([row[place] for row in rows], np.int64) for place in (0, 1, 2, 4))
    flags = [np.isin(np.arange(len(rows)), list(marked)) for marked in (failed, cut)]
    rewards = np.array([row[3] for row in rows])
    return Candidates(groups, samples, steps, rewards, lengths, np.ones(len(rows), bool), *flags)


def test_best_median_and_worst_are_of_late_steps_where_that_is_asked_for() -> None:
    found = candidates(
        (1, 0, 0, 9.0, 3), (1, 0, 1, -9.0, 3), (20, 5, 0, 0.2, 3), (20, 5, 1, 0.5, 3), (19, 4, 0, 0.9, 3), (18, 3, 1, 0.1, 3),
        (0, 6, 0, 8.0, 3),
    )  # fmt: skip
    late = {one.kind: one for one in choose(found, best=1, worst=1, median=1, is_late=True)}
    assert (late["best"].group_id, late["worst"].group_id, late["median"].reward) == (4, 3, 0.2)
    assert late["best"].why == "highest reward of steps 16 to 20"
    best, *_, worst = choose(found, best=2, worst=1)
    assert (best.group_id, worst.reward, worst.why) == (0, -9.0, "lowest reward")
    assert [one.step for one in choose(found, best=2)] == [1, None]


def test_who_is_alone_in_its_group() -> None:
    found = candidates(
        (1, 0, 0, 0.0, 5), (1, 0, 1, 0.0, 5), (1, 0, 2, 1.0, 5),
        (1, 1, 0, 1.0, 5), (1, 1, 1, 1.0, 50), (1, 1, 2, 0.3, 5),
        (1, 2, 0, 0.5, 1), (1, 2, 1, 0.0, 0), (1, 3, 0, 0.0, 5), (1, 3, 1, 9.0, 5),
        failed=[7], cut=[4],
    )  # fmt: skip
    why = {one.why.partition(":")[0]: (one.group_id, one.sample_index) for one in choose(found, odd=9)}
    assert why["the last episode that failed"] == (2, 1)
    assert why["longest response"] == (1, 1) and why["shortest response"] == (2, 0)
    assert why["alone in succeeding"] == (0, 2) and why["alone in failing"] == (1, 2), "group 3 has two samples only"
    assert len(set(why.values())) == len(why)


def test_nothing_to_choose_from() -> None:
    only_failed = candidates((1, 0, 0, 1.0, 3), (1, 0, 1, float("nan"), 3), failed=[0])
    assert [one.why for one in choose(only_failed, best=2, worst=2, median=2, odd=9)] == [
        "the last episode that failed"
    ]
    assert choose(Candidates.join([]), best=1, worst=1, median=1, odd=9, is_late=True) == []


def test_chosen_samples_are_read_with_their_fates(varied: RunLayout) -> None:
    found = read_samples(count_groups(varied), [(5, 1), (2, 0), (5, 0)])
    assert [(one.group_id, one.sample_index, str(fate)) for one, fate in found] == [
        (5, 1, "None"),
        (2, 0, "rejected(stale, 1)"),
        (5, 0, "None"),
    ]
    with pytest.raises(InputError, match="group 77, sample 0 does not count"):
        read_samples(count_groups(varied), [(77, 0)])
    with pytest.raises(CorruptArtefactError, match="holds no sample 9 of group 5"):
        read_samples(count_groups(varied), [(5, 9)])
