"""Two runs, or two steps, on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_runs import write_samples
from builders import commit_batch, make_run, make_trajectory, past_incarnation

from milesbatch.analysis.compare import Side, _hashes, compare
from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.store.layout import RunLayout


def side(layout: RunLayout, step: int | None = None) -> Side:
    return Side(layout.root.name, TrajectoryScan(count_groups(layout)), step)


def run_of(root: Path, *groups: list[dict[str, Any]]) -> RunLayout:
    """A run of one step for each entry of ``groups``: what the two samples of its one group change."""
    layout = make_run(root)
    past_incarnation(layout)
    for group, samples in enumerate(groups):
        rows = [make_trajectory(group, index, **changes) for index, changes in enumerate(samples)]
        commit_batch(layout, group + 1, write_samples(layout, rows))
    return layout


def test_a_run_is_equal_to_itself(varied: RunLayout) -> None:
    result = compare(side(varied), side(varied))
    assert result.are_equal and result.changes == () and result.equal_samples == 24
    assert (result.better, result.worse, result.common_prompts) == (0, 0, 3)


def test_what_changed_comes_first(tmp_path: Path) -> None:
    before = run_of(tmp_path / "a", [{"reward": 0.0}, {"reward": 0.5}], [{"reward": 0.0}] * 2, [{"reward": 1.0}] * 2)
    after = run_of(
        tmp_path / "b",
        [{"reward": 0.5}, {"reward": 0.5}],
        [{"reward": 0.0}, {"reward": 1.0, "tokens": (5, 6, 1, 2, 3)}],
        [{"reward": 1.0}] * 2,
    )
    result = compare(side(before), side(after))
    assert not result.are_equal
    assert (result.better, result.worse, result.unchanged) == (2, 0, 1)
    assert (result.matched_samples, result.equal_samples) == (6, 5)
    assert [change.prompt_id for change in result.changes] == ["p1", "p0"]
    first = result.changes[0]
    assert (first.reward, first.shown, first.shown_rewards) == ((0.0, 0.5), ((1, 1), (1, 1)), (0.0, 1.0))
    assert not first.tokens_equal and result.changes[1].tokens_equal
    assert result.reward_mean == pytest.approx((1.25 / 3, 2 / 3))


def test_two_steps_of_one_run_match_by_prompt_id(tmp_path: Path) -> None:
    again = [{"prompt_id": "p0", "reward": 1.0, "tokens": (5, 6, 9, 9, 9)}] * 2
    layout = run_of(tmp_path / "a", [{"reward": 0.0}] * 2, again)
    result = compare(side(layout, 1), side(layout, 2))
    assert (result.matched_by, result.common_prompts, result.better) == ("prompt_id", 1, 1)
    assert result.changes[0].shown == ((0, 0), (1, 0))


def test_prompts_without_a_common_id_match_by_their_tokens(tmp_path: Path) -> None:
    other = {"tokens": (8, 6, 7, 8, 9), "reward": 1.0}
    layout = run_of(tmp_path / "a", [{"reward": 0.0}] * 2, [{"reward": 1.0}] * 2, [other] * 2)
    result = compare(side(layout, 1), side(layout, 2))
    assert (result.matched_by, result.common_prompts, result.only) == ("prompt tokens", 1, (0, 0))
    nothing = compare(side(layout, 1), side(layout, 3))
    assert (nothing.common_prompts, nothing.reward_mean, nothing.are_equal) == (0, (None, None), False)
    assert nothing.sides[1].reward_mean == 1.0


def test_failed_episodes_do_not_count_for_the_means(tmp_path: Path) -> None:
    before = run_of(tmp_path / "a", [{"reward": 1.0}, {"reward": 0.0, "error": "boom"}])
    after = run_of(tmp_path / "b", [{"reward": 0.0, "error": "boom"}] * 2)
    result = compare(side(before), side(after))
    assert (result.sides[0].reward_mean, result.sides[1].reward_mean) == (1.0, None)
    assert (result.sides[1].failed, result.better, result.worse, result.changes) == (2, 0, 0, ())
    assert result.are_equal, "the tokens are"


def test_other_numbers_of_samples_are_matched_as_far_as_they_go(tmp_path: Path) -> None:
    before = run_of(tmp_path / "a", [{}, {}, {}])
    after = run_of(tmp_path / "b", [{}])
    result = compare(side(before), side(after))
    assert (result.matched_samples, result.equal_samples, result.are_equal) == (1, 1, False)


def test_an_empty_run_on_either_side(tmp_path: Path, varied: RunLayout) -> None:
    empty = run_of(tmp_path / "empty")
    for pair in ((empty, varied), (varied, empty), (empty, empty)):
        result = compare(side(pair[0]), side(pair[1]))
        assert (result.common_prompts, result.matched_samples, result.are_equal) == (0, 0, False)


def test_hashes_tell_token_lists_apart() -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(0, 3, random.integers(0, 6)).tolist() for _ in range(3000)] + [
        [0],
        [0, 0],
        [],
        [1, 0],
        [0, 1],
    ]
    lengths = np.array([len(row) for row in rows])
    flat = np.array([token for row in rows for token in row], np.int32)
    hashes = _hashes(flat, lengths, lengths)
    by_row: dict[tuple[int, ...], set[int]] = {}
    for row, value in zip(rows, hashes.tolist(), strict=True):
        by_row.setdefault(tuple(row), set()).add(value)
    assert all(len(values) == 1 for values in by_row.values())
    assert len(set(hashes.tolist())) == len(by_row)
    prefix = _hashes(flat, lengths, np.minimum(lengths, 2))
    assert len(set(prefix.tolist())) == len({tuple(row[:2]) for row in rows})
