"""Tables of statistics: a long run keeps its beginning, and says where its reward changed."""

from __future__ import annotations

import io

from rich.console import Console

from milesbatch.analysis.statistics import StepStatistics
from milesbatch.cli.traj_words import step_table


def _step(number: int, reward: float) -> StepStatistics:
    return StepStatistics(
        step=number, reward_mean=reward, reward_std=0.1, reward_min=0.0, reward_max=1.0, length_mean=3.0, length_max=4,
        staleness_mean=1.0, staleness_max=1, failed=0, trained=4, rejected=0, rejected_by_reason={}, samples=16,
        finish_reasons={"stop": 16}, failed_by_cause={}, response_tokens=48, tokens_per_s=None,
    )  # fmt: skip


def _shown(steps: list[StepStatistics], *, show_all: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(step_table(steps, show_all=show_all))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _wavering(number: int) -> float:
    return 0.01 * (number % 3)


def test_a_clear_jump_is_named_with_its_step() -> None:
    steps = [_step(number, (0.3 if number < 61 else 0.8) + _wavering(number)) for number in range(1, 121)]
    text = _in_one_line(_shown(steps))
    assert "largest changes of the reward: at step 61, 0.3" in text and " to 0.8" in text
    assert "(means of 4 steps each)" in text and "noise" not in text


def test_the_beginning_and_the_end_are_shown_and_the_middle_is_counted() -> None:
    steps = [_step(number, 0.5 + _wavering(number)) for number in range(1, 121)]
    lines = [line.split() for line in _shown(steps).splitlines()]
    rows = [int(words[0]) for words in lines if len(words) == 10 and words[0].isdigit()]
    assert rows == [*range(1, 11), *range(91, 121)]
    assert "80 steps in between are not shown (--all)" in _in_one_line(_shown(steps))
    assert "not shown" not in _shown(steps, show_all=True)
    assert "none is clearly more than noise" in _in_one_line(_shown(steps))


def test_short_runs_have_no_jumps() -> None:
    assert "largest" not in _shown([_step(1, 0.5)]) and "not shown" not in _shown([_step(1, 0.5)])
