"""Following a run: which versions, in which order, held against retirement, and what happens to one that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import AT, past_incarnation
from evaluation_rig import Rig
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.engines.sglang.key import key_of
from milesbatch.errors import InputError, StoppedToContinue, UsageError
from milesbatch.evaluation import by_hand, following
from milesbatch.evaluation.asking import due_versions, section_of
from milesbatch.evaluation.by_hand import Wish, evaluate_by_hand
from milesbatch.evaluation.following import follow_versions, hold_from
from milesbatch.evaluation.generating import Evaluating, Means, open_means
from milesbatch.recipe.models import Evaluation, FileData
from milesbatch.records import Hold, Retirement
from milesbatch.rollout.episodes import Recorder
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import OpenRun, open_run
from milesbatch.weights.reader import read_manifest


class Story:
    """An event log in memory."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.fields: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields["version"]))
        self.fields.append(fields)


def held(layout: RunLayout) -> list[int]:
    return sorted(Hold.from_bytes(path.read_bytes(), path.name).version for path in layout.holds.glob("*.json"))


def retire(layout: RunLayout, version: int) -> None:
    record = Retirement(version=version, incarnation=1, base=2, needed=2, checkpoint=4, staleness=1, created_at=AT)
    layout.weights_retirement(version).write_bytes(record.to_bytes())
    for path in layout.weights_version(version).glob("*.safetensors"):
        path.unlink()


def follow(rig: Rig, due: tuple[int, ...], await_published: Callable[[int], bool] = lambda version: True) -> Story:
    story = Story()
    with hold_from(rig.layout, due[0]) as hold:
        follow_versions(rig.layout, rig.evaluator(), due, story, hold, await_published)
    assert held(rig.layout) == [], "nothing is held afterwards"
    return story


@pytest.mark.parametrize(("steps", "every", "expected"), [(8, 3, (0, 3, 6, 8)), (8, 4, (0, 4, 8)), (2, 10, (0, 2))])
def test_the_first_and_the_last_version_are_always_due(steps: int, every: int, expected: tuple[int, ...]) -> None:
    assert due_versions(steps, every) == expected


def test_due_versions_are_evaluated_in_order_and_told(rig: Rig) -> None:
    story = follow(rig, (0, 2))
    assert story.told == [(name, v) for v in (0, 2) for name in ("evaluation_started", "evaluation_committed")]
    record = rig.evaluate(2)
    last = story.fields[-1]
    assert last["path"] == f"evaluations/000002/{record.tag}.json"
    assert last["metrics"]["eval/reward_mean"] == record.figures.reward_mean
    assert follow(rig, (0, 2)).told == [], "the next start finds them"


def test_what_is_waited_for_is_held_and_what_is_done_is_not(rig: Rig) -> None:
    seen: list[tuple[int, list[int]]] = []

    def await_published(version: int) -> bool:
        seen.append((version, held(rig.layout)))
        return version < 2

    assert [v for _, v in follow(rig, (0, 1, 2), await_published).told] == [0, 0, 1, 1]
    assert seen == [(0, [0]), (1, [1]), (2, [2])]


def test_a_version_that_cannot_be_had_is_told_and_the_next_one_is_evaluated(rig: Rig) -> None:
    retire(rig.layout, 0)
    manifest = rig.layout.weights_manifest(1)
    manifest.write_bytes(manifest.read_bytes()[:-20])
    story = follow(rig, (0, 1, 2))
    assert story.told == [
        ("evaluation_started", 0),
        ("evaluation_skipped", 0),
        ("evaluation_skipped", 1),
        ("evaluation_started", 2),
        ("evaluation_committed", 2),
    ]
    assert "retired" in story.fields[1]["error"]


def test_a_version_that_is_told_of_and_not_seen_yet_is_looked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = rig.layout.weights_manifest(2)
    data, slept = hidden.read_bytes(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        hidden.write_bytes(data)

    hidden.unlink()
    monkeypatch.setattr(following.time, "sleep", sleep)
    assert follow(rig, (2,)).told[-1] == ("evaluation_committed", 2)
    assert len(slept) == 1


def test_a_stop_in_the_middle_reaches_the_caller_and_frees_the_hold(rig: Rig) -> None:
    story = Story()
    with pytest.raises(StoppedToContinue), hold_from(rig.layout, 0) as hold:
        follow_versions(rig.layout, rig.evaluator(lambda: True), (0, 2), story, hold, lambda version: True)
    assert story.told == [("evaluation_started", 0)] and held(rig.layout) == []


# -- by hand --------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_hand_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., by_hand.Outcome]:
    """``milesbatch evaluate`` with the tiny model: only what loads it is replaced."""

    def means(run: OpenRun, asking: Any, who: Evaluating) -> Means:
        rig.asking = asking
        evaluator = rig.evaluator()
        return Means(evaluator.follower, evaluator.prepare, rig.close)

    monkeypatch.setattr(by_hand, "open_means", means)
    monkeypatch.setattr(by_hand, "_POLL_S", 0.01)
    monkeypatch.setattr(
        by_hand.FileMetadata, "of_run", classmethod(lambda cls, record: cls("run-1", "xxh128:" + "0" * 32))
    )

    def evaluate(wish: Wish, is_finished: Callable[[int], bool] = lambda steps: True) -> by_hand.Outcome:
        return evaluate_by_hand(rig.layout, wish, is_finished, lambda text: None)

    return evaluate


def versions(outcome: by_hand.Outcome) -> list[int]:
    return [record.version for record in outcome.records]


def test_by_hand_what_is_published_is_evaluated_and_what_is_not_is_left(
    rig: Rig, by_hand_on: Callable[..., by_hand.Outcome]
) -> None:
    assert versions(by_hand_on(Wish(every=2))) == [0, 2]
    assert versions(by_hand_on(Wish(versions=(1,)))) == [1]
    tokens = rig.tokens_generated
    assert versions(by_hand_on(Wish(every=1))) == [0, 1, 2]
    assert rig.tokens_generated == tokens
    with pytest.raises(InputError, match=r"policy version 9 .* is not published"):
        by_hand_on(Wish(versions=(1, 9)))


def test_by_hand_with_other_prompts_or_samples_it_is_another_curve(
    rig: Rig, by_hand_on: Callable[..., by_hand.Outcome], tmp_path: Path
) -> None:
    file = tmp_path / "hard.jsonl"
    file.write_text('{"prompt": "123+456=", "answer": "579"}\n')
    own = by_hand_on(Wish(versions=(1,))).records[0]
    hard = by_hand_on(Wish(versions=(1,), prompts=file)).records[0]
    more = by_hand_on(Wish(versions=(1,), samples=2, temperature=1.0)).records[0]
    assert (own.name, hard.name, more.name) == ("recipe", "hard", "recipe")
    assert len({own.tag, hard.tag, more.tag}) == 3
    assert (hard.figures.samples, more.figures.samples) == (1, 10)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (
            Wish(every=3, samples=2),
            r"--samples 2: samples_per_prompt is 2 with temperature 0(.|\n)*--temperature above 0",
        ),
        (Wish(samples=2, temperature=0), r"--samples 2 --temperature 0: (.|\n)*or --samples 1"),
        (Wish(temperature=float("inf")), r"--temperature inf: .*finite(.|\n)*give 0"),
        (Wish(temperature=float("nan"), every=2), r"^--temperature nan: .*(.|\n)*give 0"),
        (Wish(temperature=-1), r"--temperature -1: .*(.|\n)*give 0"),
        (Wish(temperature=1e-9), r"--temperature 1e-09: .*at least 1e-06"),
        (Wish(samples=0, temperature=1), r"^--samples 0: .*(.|\n)*1 or more"),
        (Wish(every=0), r"--every 0: .*(.|\n)*1 or more"),
    ],
)
def test_by_hand_values_that_cannot_be_asked_are_told_with_their_option(
    by_hand_on: Callable[..., by_hand.Outcome], wish: Wish, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        by_hand_on(wish)


def test_by_hand_greedily_where_the_recipe_wants_several_samples(rig_with: Callable[..., Rig]) -> None:
    rig = rig_with(samples_per_prompt=4, temperature=1.0)
    with pytest.raises(UsageError, match=r"^--temperature 0: samples_per_prompt is 4 (.|\n)*--samples 1"):
        evaluate_by_hand(rig.layout, Wish(temperature=0), lambda steps: True, lambda text: None)


def test_by_hand_the_key_that_is_given_wins_over_the_recipes(
    rig: Rig, by_hand_on: Callable[..., by_hand.Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    keys: list[str] = []

    def means(run: OpenRun, asking: Any, who: Evaluating) -> Means:
        keys.append(key_of(run.recipe.rollout.sglang))
        evaluator = rig.evaluator()
        return Means(evaluator.follower, evaluator.prepare, rig.close)

    monkeypatch.setattr(by_hand, "open_means", means)
    by_hand_on(Wish(versions=(1,), urls=("http://node7:30000",), key_file=tmp_path / "key"))
    by_hand_on(Wish(versions=(1,), urls=("http://node7:30000",)))
    assert keys == ["s3cret", ""]
    (tmp_path / "key").write_text("")
    for name in ("key", "none"):
        with pytest.raises(InputError, match=rf"^--key-file: .*{name} .*(.|\n)*the servers of --url"):
            by_hand_on(Wish(versions=(1,), urls=("http://node7:30000",), key_file=tmp_path / name))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--key-file", "key"], "--key-file key is for servers that run already"),
        (["--key-file", "key", "--url", "http://node7:30000"], "--key-file: .*/key cannot be read"),
        (["--temperature", "inf"], "--temperature inf: "),
    ],
)
def test_the_command_says_what_is_wrong_with_its_options(rig: Rig, words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(rig.layout.root), *words])
    assert isinstance(result.exception, InputError), result.output
    assert re.search(said, str(result.exception))


def test_by_hand_following_goes_on_over_a_restart_until_the_run_is_finished(
    rig: Rig, by_hand_on: Callable[..., by_hand.Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def sleep(seconds: float) -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            rig.place.incarnation = past_incarnation(rig.layout)
        elif len(looks) == 3:
            rig.place.publish(3)

    monkeypatch.setattr(by_hand.time, "sleep", sleep)
    outcome = by_hand_on(Wish(every=1, follow=True), lambda steps: len(looks) >= 4)
    assert versions(outcome) == [0, 1, 2, 3]
    assert read_manifest(rig.layout, 3) is not None
    assert {record.incarnation for record in outcome.records} == {1, 2}


def test_a_recipe_without_the_section_needs_a_file(rig: Rig) -> None:
    bare = rig.place.recipe.model_copy(update={"evaluation": None})
    with pytest.raises(UsageError, match="no section evaluation"):
        section_of(bare)
    section = section_of(bare, Path("x.jsonl"))
    assert (section.prompts.kind, section.num_prompts, section.temperature) == ("file", None, 0.0)
    own = {"prompts": {"kind": "file", "path": "own.jsonl", "prompt_field": "question", "id_field": "id"}}
    named = rig.place.recipe.model_copy(update={"evaluation": Evaluation.model_validate(own)})
    asked = section_of(named, Path("x.jsonl")).prompts
    assert asked == FileData(path="x.jsonl", prompt_field="question"), (
        "columns as in the recipe, but ids need not be there"
    )


def test_servers_are_of_no_use_to_the_embedded_engine(rig: Rig) -> None:
    run = open_run(rig.layout, rig.place.incarnation)
    who = Evaluating(Recorder("evaluation-0", 1), "evaluation-host-1", urls=("http://node7:30000",))
    with pytest.raises(UsageError, match="uses no server such as http://node7:30000"):
        open_means(run, rig.asking, who)
