"""What an evaluator did, as slices, and its troubles."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_layout
from events_made import BEGIN_S, write

from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import read_evidence
from milesbatch.timeline.slices import tell
from milesbatch.timeline.troubles import find_troubles


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = make_layout(tmp_path / "run")
    begun = {"cause": "first", "last_batch": 0, "last_version": -1, "quarantined": []}
    write(
        made, "controller-0", 1,
        (0, "incarnation_started", begun),
        (1, "process_started", {"name": "evaluation-0", "pid": 1, "attempt": 1}),
        (50, "evaluation_off", {"reason": "killed by SIGKILL", "said": "no memory"}),
    )  # fmt: skip
    done = {"version": 0, "seconds": 4.0, "metrics": {"eval/reward_mean": 0.25}}
    write(
        made, "evaluation-0", 1,
        (2, "evaluation_started", {"version": 0}), (9, "ready", {"seconds": 8}), (14, "evaluation_committed", done),
        (20, "evaluation_skipped", {"version": 10, "error": "it was retired"}),
    )  # fmt: skip
    return made


def test_it_starts_and_evaluates(layout: RunLayout) -> None:
    found = [piece for piece in tell(read_evidence(layout, 1)).slices if piece.process == "evaluation-0"]
    assert [(p.activity, p.start_s - BEGIN_S, p.end_s - BEGIN_S) for p in found] == [
        ("starting", 1.0, 9.0),
        ("evaluating", 10.0, 14.0),
    ]
    assert found[1].text == "policy version 0: reward 0.250"


def test_its_troubles_say_that_training_goes_on(layout: RunLayout) -> None:
    evidence = read_evidence(layout, 1)
    found = [trouble for trouble in find_troubles(evidence, tell(evidence)) if trouble.who == "evaluation-0"]
    assert [(trouble.kind, trouble.said) for trouble in found] == [("data", ""), ("lost", "no memory")]
    assert found[0].what == "policy version 10 was not evaluated: it was retired"
    assert found[1].then == "training went on without it"
