"""What a reader who has not seen such a page needs: its words, what faults cost, where deaths were, how it began."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from long_run import make_long_run

from milesbatch.analysis.choose import Candidates, choose
from milesbatch.report.page.changes import changes_charts, changes_section
from milesbatch.report.page.document import _deaths
from milesbatch.report.page.glossary import WORDS
from milesbatch.report.page.made import sample_cards
from milesbatch.report.page.make import write_page
from milesbatch.report.page.steps import collect_steps
from milesbatch.report.page.told import cost_of_faults
from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import read_evidence
from milesbatch.timeline.losses import add_up_losses
from milesbatch.timeline.slices import Life, Slice, Story, tell
from milesbatch.timeline.troubles import Trouble, find_troubles
from milesbatch.weights.changes import Changes, Group

STEPS = 60


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("readers")
    layout = make_long_run(directory / "nightly", steps=STEPS, jump_at=30, workers=3)
    write_page(layout, directory / "r.html", with_audit=False, tell_progress=lambda _: None)
    return (directory / "r.html").read_text(), layout.root


def test_the_page_ends_with_its_words_and_the_navigation_leads_there(page: tuple[str, Path]) -> None:
    text = page[0]
    assert 'href="#words"' in text and 'id="words"' in text
    for word in ("replayed", "generated again", "repeated", "lag, staleness", "incarnation"):
        assert word in dict(WORDS)
        assert f"<dt>{word}</dt>" in text
    assert text.index('id="words"') > text.index('id="steps"')


def life(process: str, incarnation: int, attempt: int, start_s: float, end_s: float) -> Life:
    return Life(process, incarnation, attempt, start_s, end_s, "", "")


def piece(process: str, incarnation: int, activity: str, start_s: float, end_s: float) -> Slice:
    return Slice(process, incarnation, "work", activity, start_s, end_s, "")  # type: ignore[arg-type]


def story() -> Story:
    """The trainer dies at 50 and works again at 58; the run at 100, and goes on at 130: 4 s starting, 6 s replaying."""
    return Story(
        slices=(
            piece("trainer-0", 1, "starting", 0, 5),
            piece("trainer-0", 1, "starting", 52, 58),
            piece("trainer-0", 1, "replaying", 58, 61),
            piece("trainer-0", 2, "starting", 131, 135),
            piece("trainer-0", 2, "replaying", 135, 141),
            piece("rollout-0", 1, "starting", 0, 4),
            piece("rollout-0", 1, "starting", 33, 40),
        ),
        lives=(
            life("rollout-0", 1, 1, 0, 30),
            life("trainer-0", 1, 1, 0, 50),
            life("rollout-0", 1, 2, 33, 100),
            life("trainer-0", 1, 2, 52, 100),
            life("trainer-0", 2, 1, 131, 200),
        ),
        incarnations=((1, 0.0, 100.0), (2, 130.0, 200.0)),
    )


def test_what_faults_cost_is_one_line_with_a_sum_that_counts_nothing_twice() -> None:
    lost = add_up_losses(story())
    assert (lost.between_s, lost.starting_s, lost.replaying_s) == (30.0, 2 + 6 + 1 + 4, 9.0)
    assert (lost.total_s, lost.workers_s, lost.whole_s) == (52.0, 3 + 7, 200.0)
    text = str(cost_of_faults(story()))
    assert re.search(r"Time lost: 52\S* s of 3 min 20 s \(26", text), text
    assert "replaying recorded steps 9" in text and "Rollout workers were away" in text


def test_a_run_without_a_restart_lost_nothing_and_says_nothing() -> None:
    quiet = Story((piece("trainer-0", 1, "starting", 0, 5),), (life("trainer-0", 1, 1, 0, 50),), ((1, 0.0, 50.0),))
    assert add_up_losses(quiet).total_s == 0
    assert cost_of_faults(quiet) is None


def test_the_sum_and_the_deaths_are_on_the_page_of_a_run_with_faults(page: tuple[str, Path]) -> None:
    text, root = page
    assert 'id="time-lost"' in text
    evidence = read_evidence(RunLayout(root), 3)
    troubles = find_troubles(evidence, tell(evidence))
    dead = [trouble for trouble in troubles if trouble.kind in ("died", "lost")]
    found = _deaths(collect_steps(evidence), troubles)
    assert dead and found and len(found) <= len(dead)
    assert f'"deaths":{found}'.replace(" ", "") in text.replace(" ", "")


def test_a_death_is_marked_at_the_step_that_was_under_way(page: tuple[str, Path]) -> None:
    steps = collect_steps(read_evidence(RunLayout(page[1]), 3))
    middle = (steps.at_s[9] + steps.at_s[10]) / 2

    def died(at_s: float, kind: str = "died") -> Trouble:
        return Trouble(at_s, 1, "rollout-0", kind, "killed")  # type: ignore[arg-type]

    assert _deaths(steps, [died(middle), died(middle + 0.001)]) == [steps.step[10]]
    assert _deaths(steps, [died(steps.at_s[-1] + 60)]) == [steps.step[-1]]
    assert _deaths(steps, [died(middle, "stopping")]) == []


def candidates(rows: list[tuple[int, int, float]]) -> Candidates:
    """(group, step, reward) of trained samples."""
    groups, steps, rewards = (np.array(column) for column in zip(*rows, strict=True))
    number = len(rows)
    no = np.zeros(number, bool)
    return Candidates(
        groups, np.zeros(number, np.int64), steps, rewards.astype(float), np.ones(number, np.int64), ~no, no, no
    )


def test_samples_of_the_first_step_are_shown_beside_those_of_the_last() -> None:
    found = candidates([(1, 3, 0.2), (2, 3, 0.9), (3, 3, 0.4), (9, 40, 1.0), (10, 40, 0.0)])
    chosen = choose(found, best=1, worst=1, is_late=True, early=2)
    early = [one for one in chosen if one.kind == "early"]
    assert [(one.group_id, one.reward) for one in early] == [(2, 0.9), (1, 0.2)]
    assert early[0].why == "highest reward of step 3, the first one"
    assert {one.kind for one in chosen} == {"best", "worst", "early"}
    assert not [one for one in choose(found, best=1, is_late=True) if one.kind == "early"]
    only = candidates([(1, 3, 0.2)])
    assert [one.kind for one in choose(only, best=1, worst=1, is_late=True, early=2)] == ["best"], "not twice"
    assert "early" not in str(sample_cards([], "run"))


def changes(densities: list[float]) -> Changes:
    group = Group("mlp", 2, 1000, density=list(densities), changed=int(1000 * sum(densities)))
    return Changes(versions=[1, 2, 3], whole=group, kinds=[group])


def test_a_curve_that_is_flat_near_all_is_said_to_be_and_is_scaled() -> None:
    dense, sparse = changes([1.0, 0.998, 1.0]), changes([0.3, 0.01, 0.2])
    assert "Nearly every element changes in every version" in str(changes_section(dense))
    assert "Nearly every element" not in str(changes_section(sparse))
    for each, has_zero in ((dense, False), (sparse, True)):
        (chart, *_), _ = changes_charts(each)
        (scale,) = [scale for scale in chart["spec"]["scales"] if scale["name"] == "y"]
        assert scale["zero"] is has_zero
