"""One policy version after the other: asked once, the same answers each time, and nothing half whenever it is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import evaluate_version, flip, make_settings
from evaluation_rig import METADATA, Rig

from milesbatch.errors import CorruptArtefactError, InputError, StoppedToContinue
from milesbatch.evaluation.figures import figures_of
from milesbatch.evaluation.reader import curves, find_evaluation, main_curve, read_evaluation, read_evaluations
from milesbatch.evaluation.writer import Subject, commit_evaluation
from milesbatch.store.operations import Operations, installed
from milesbatch.trajectories.trajectory import Trajectory


def answers(samples: list[Trajectory]) -> list[tuple[object, ...]]:
    return [(one.group_id, one.sample_index, one.tokens, one.logprobs, one.reward, one.versions) for one in samples]


def test_the_record_says_what_the_file_holds(rig: Rig) -> None:
    record = rig.evaluate(2)
    samples = rig.samples(record)
    assert [(one.group_id, one.sample_index) for one in samples] == [(group, 0) for group in range(5)]
    assert all(span.version == 2 for one in samples for span in one.versions)
    assert {one.weights_digest for one in samples} == {record.weights_digest} == {rig.digest(2)}
    assert all("evaluation" in one.prompt_id and one.response_tokens <= 12 for one in samples)
    assert record.figures == figures_of(samples)
    assert record.figures.samples == 5 and sum(record.figures.finish_reasons.values()) == 5
    assert read_evaluation(rig.records(2)[0]) == record
    assert not list(rig.layout.trajectories.iterdir()), "they are no training groups"


def test_a_version_that_was_evaluated_is_found_and_not_asked_again(rig: Rig) -> None:
    first = rig.evaluate(1)
    before, names = rig.tokens_generated, rig.names(1)
    assert rig.evaluate(1) == first
    assert (rig.tokens_generated, rig.names(1)) == (before, names)


def test_the_same_weights_give_the_same_answers_whoever_asks(rig: Rig) -> None:
    one = rig.evaluator()
    rig.evaluate(0, one)
    first = rig.samples(rig.evaluate(2, one))
    rig.records(2)[0].unlink()
    for path in rig.layout.evaluation(2).iterdir():
        path.unlink()
    assert answers(rig.samples(rig.evaluate(2))) == answers(first), "not what was evaluated before"
    assert answers(rig.samples(rig.evaluate(1))) != answers(first)


def test_several_samples_are_drawn_from_seeds_of_their_own(rig_with: Callable[..., Rig]) -> None:
    rig = rig_with(samples_per_prompt=3, temperature=1.0)
    record = rig.evaluate(0)
    samples = rig.samples(record)
    assert len(samples) == 15 and len({one.seed for one in samples}) == 15
    assert len({one.tokens for one in samples if one.group_id == 0}) > 1
    best = [max(one.reward for one in samples if one.group_id == group) for group in range(5)]
    assert record.figures.reward_best_mean == pytest.approx(sum(best) / 5)


def test_told_to_stop_nothing_is_written(rig: Rig) -> None:
    evaluator = rig.evaluator(should_stop=lambda: True)
    with pytest.raises(StoppedToContinue):
        rig.evaluate(0, evaluator)
    assert not rig.layout.evaluation(0).exists()
    assert rig.evaluate(0).version == 0


class Killed(BaseException):
    """As SIGKILL: no handler of the code under test may see it as an error."""


class Dying(Operations):
    """Ends the process before its ``number``-th mutation, and all that follow."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.done: list[str] = []

    def __getattribute__(self, name: str) -> object:
        found = object.__getattribute__(self, name)
        if name not in ("create", "sync_file", "sync_directory", "link", "unlink", "make_directory"):
            return found

        def mutate(*arguments: object) -> object:
            if self.left == 0:
                raise Killed
            self.left -= 1
            self.done.append(name)
            return found(*arguments)  # type: ignore[operator]

        return mutate


def test_killed_before_any_of_its_mutations_the_next_one_goes_on(rig: Rig) -> None:
    """Each evaluation is the same; so the state of the disk when it dies is the only difference."""
    expected: list[tuple[object, ...]] | None = None
    number = 0
    while True:
        dying = Dying(number)
        try:
            with installed(dying):
                rig.evaluate(1)
            break
        except Killed:
            pass
        committed = (
            [name for name in rig.names(1) if name.endswith(".arrow")] if rig.layout.evaluation(1).exists() else []
        )
        tokens = rig.tokens_generated
        record = rig.evaluate(1)
        assert (rig.tokens_generated == tokens) == bool(committed), "whole answers are taken up, not made again"
        assert len(rig.records(1)) == 1 and read_evaluations(rig.layout)[0] == [record]
        files = [name for name in rig.names(1) if name.endswith(".arrow")]
        assert files == [record.files[0].path], "nothing is left over"
        found = answers(rig.samples(record))
        expected = expected or found
        assert found == expected
        for path in rig.layout.evaluation(1).iterdir():
            path.unlink()
        rig.layout.evaluation(1).rmdir()
        number += 1
    assert number > 8 and dying.done.count("link") == 2, dying.done


def test_of_two_evaluators_the_first_record_counts_and_the_other_file_goes(rig: Rig) -> None:
    first = rig.evaluate(0)
    subject = rig.asking.of(0, first.weights_digest)
    late = [one for one in rig.samples(first)]
    moved = [one.__class__(**{**_fields(one), "worker": "evaluation-1"}) for one in late]
    assert commit_evaluation(rig.layout, subject, moved, METADATA) == first
    assert len(rig.names(0)) == 2


def _fields(one: Trajectory) -> dict[str, object]:
    return {name: getattr(one, name) for name in Trajectory.__slots__}


def test_a_take_over_that_sweeps_meanwhile_costs_a_second_write(rig: Rig) -> None:
    class Sweeping(Operations):
        count = 0

        def link(self, source: Path, target: Path) -> None:
            Sweeping.count += 1
            if Sweeping.count == 1:
                source.unlink()
            super().link(source, target)

    with installed(Sweeping()):
        record = rig.evaluate(0)
    assert read_evaluation(rig.records(0)[0]) == record and len(rig.names(0)) == 2


def test_what_is_not_what_was_asked_is_refused(rig: Rig) -> None:
    record = rig.evaluate(0)
    samples = rig.samples(record)
    for wrong, words in (
        (samples[:-1], "not those of 5 prompts"),
        ([*samples[:-1], samples[0]], "not those of 5 prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            commit_evaluation(rig.layout, rig.asking.of(0, record.weights_digest), wrong, METADATA)
    with pytest.raises(ValueError, match="not of policy version 1"):
        commit_evaluation(rig.layout, rig.asking.of(1, rig.digest(1)), samples, METADATA)
    other = Subject(0, rig.digest(1), "recipe", rig.asking.settings)
    with pytest.raises(ValueError, match="answered with weights"):
        commit_evaluation(rig.layout, other, samples, METADATA)


def test_a_damaged_record_is_an_error_and_not_an_evaluation(rig: Rig) -> None:
    record = rig.evaluate(0)
    flip(rig.records(0)[0], 40)
    assert read_evaluations(rig.layout)[0] == []
    with pytest.raises(CorruptArtefactError):
        rig.evaluate(0)
    with pytest.raises(CorruptArtefactError):
        find_evaluation(rig.layout, record.version)


def test_a_damaged_file_without_a_record_is_passed_over(rig: Rig) -> None:
    rig.evaluate(0)
    rig.records(0)[0].unlink()
    (path,) = rig.layout.evaluation(0).iterdir()
    flip(path, path.stat().st_size // 2)
    tokens = rig.tokens_generated
    record = rig.evaluate(0)
    assert rig.tokens_generated > tokens and record.files[0].path != path.name


def test_curves_are_of_one_kind_of_asking_each(rig: Rig) -> None:
    layout = rig.layout
    other = make_settings(2, prompts=b"other")
    evaluate_version(layout, 0, (0.0, 0.0))
    evaluate_version(layout, 2, (0.5, 0.5))
    evaluate_version(layout, 1, (1.0, 1.0))
    evaluate_version(layout, 2, (1.0, 1.0), name="hard", settings=other)
    found = curves(read_evaluations(layout)[0])
    assert [(curve.name, [point.version for point in curve.points]) for curve in found] == [
        ("recipe", [0, 1, 2]),
        ("hard", [2]),
    ]
    assert (found[0].last.version, found[0].best.version) == (2, 1)
    assert main_curve(layout) == found[0]
    assert find_evaluation(layout, 2).name == "recipe"
    with pytest.raises(InputError, match=r"version 7 .* has not been evaluated"):
        find_evaluation(layout, 7)
