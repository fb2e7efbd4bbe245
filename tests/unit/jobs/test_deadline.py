"""When the time that a job has left is what a stop takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from milesbatch.controller.stopping import StopCause
from milesbatch.errors import SlurmError
from milesbatch.jobs.deadline import DeadlineWatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Slurm:
    """Gives its answers in turn; None stands for no limit, an exception for no answer."""

    def __init__(self, *answers: float | SlurmError | None) -> None:
        self.answers = list(answers)

    def __call__(self) -> float | None:
        answer = self.answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer


NO_ANSWER = SlurmError("Unable to contact slurm controller")


def test_time_counts_down_between_two_answers() -> None:
    clock = Clock()
    watch = DeadlineWatch(lambda: 60.0, Slurm(100.0), clock=clock)
    assert watch.look_for_stop() is None, "nothing is known yet"
    watch.ask_once()
    assert watch.look_for_stop() is None
    clock.now_s += 39.0
    assert watch.look_for_stop() is None
    clock.now_s += 2.0
    stop = watch.look_for_stop()
    assert stop is not None
    assert (stop.cause, stop.at_once, stop.nodes) == (StopCause.TIME_LIMIT, False, ())
    assert "59 s" in stop.text and "60 s" in stop.text


@pytest.mark.parametrize(("left_s", "within_s"), [(60.0, 50.0), (21.0, 11.0), (20.0, 10.0), (8.0, 4.0)])
def test_time_is_kept_for_queueing_the_job_again(left_s: float, within_s: float) -> None:
    """What is not saved by then is given up: a job that is over cannot be requeued. Of little time half is for saving."""
    watch = DeadlineWatch(lambda: 100.0, Slurm(left_s), clock=Clock())
    watch.ask_once()
    stop = watch.look_for_stop()
    assert stop is not None and stop.within_s == within_s


def test_an_unanswered_question_lets_the_last_answer_count_down() -> None:
    clock = Clock()
    watch = DeadlineWatch(lambda: 60.0, Slurm(100.0, NO_ANSWER), clock=clock)
    watch.ask_once()
    clock.now_s += 50.0
    watch.ask_once()
    assert watch.look_for_stop() is not None


def test_a_limit_that_somebody_moves_is_followed() -> None:
    clock = Clock()
    watch = DeadlineWatch(lambda: 60.0, Slurm(70.0, 1000.0, 30.0), clock=clock)
    watch.ask_once()
    clock.now_s += 20.0
    watch.ask_once()
    assert watch.look_for_stop() is None
    watch.ask_once()
    assert watch.look_for_stop() is not None


def test_no_limit_and_no_answer_at_all_never_stop_a_run() -> None:
    watch = DeadlineWatch(lambda: 60.0, Slurm(None, NO_ANSWER), clock=Clock())
    watch.ask_once()
    watch.ask_once()
    assert watch.look_for_stop() is None


def test_what_a_stop_takes_is_asked_each_time() -> None:
    needed = [10.0]
    watch = DeadlineWatch(lambda: needed[0], Slurm(100.0), clock=Clock())
    watch.ask_once()
    assert watch.look_for_stop() is None
    needed[0] = 100.0
    assert watch.look_for_stop() is not None


def test_a_warning_leads_to_a_question_at_once() -> None:
    answers, warnings = [1000.0, 5.0], [0]
    watch = DeadlineWatch(lambda: 60.0, lambda: answers.pop(0), num_warnings=lambda: warnings[0], ask_every_s=1e6)
    watch.start()
    assert _within(5.0, lambda: len(answers) == 1)
    assert watch.look_for_stop() is None
    warnings[0] = 1
    assert _within(5.0, lambda: watch.look_for_stop() is not None)


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return happened()
