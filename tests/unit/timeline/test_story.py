"""What the events say about who did what when, and why something was started again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from builders import make_layout
from events_made import BEGIN_S, step, write

from milesbatch.store.layout import RunLayout
from milesbatch.timeline.evidence import read_evidence
from milesbatch.timeline.slices import Slice, Story, gaps_between, tell
from milesbatch.timeline.troubles import Trouble, find_troubles


def story_of(layout: RunLayout) -> Story:
    return tell(read_evidence(layout, 0))


def of(story: Story, process: str, activity: str) -> list[tuple[float, float]]:
    found = [piece for piece in story.slices if (piece.process, piece.activity) == (process, activity)]
    return [(round(piece.start_s - BEGIN_S, 3), round(piece.end_s - BEGIN_S, 3)) for piece in found]


def test_publishing_beside_the_next_step(tmp_path: Path) -> None:
    """The event comes late; the step ended when training went on."""
    layout = make_layout(tmp_path / "run")
    figures = {"publish_s": 0.25, "publish_overlap_s": 1.5}
    write(layout, "trainer-0", 1, (10, "ready", {"seconds": 1}), (20, "train_step", step(1, **figures)))
    story = story_of(layout)
    assert of(story, "trainer-0", "training") == [(16.25, 18.25)]
    assert of(story, "trainer-0", "publishing") == [(18.25, 18.5), (18.5, 20)]
    tracks = {piece.track: piece.version for piece in story.slices if piece.activity == "publishing"}
    assert tracks == {"work": None, "weights": 1}, "the version is out when the second one ends"


def troubles_of(layout: RunLayout) -> list[Trouble]:
    evidence = read_evidence(layout, 0)
    return find_troubles(evidence, tell(evidence))


def test_a_train_step_is_waiting_training_publishing(faulty: RunLayout) -> None:
    story = story_of(faulty)
    assert of(story, "trainer-0", "waiting")[:2] == [(11.5, 12.5), (16.5, 17.5)]
    assert of(story, "trainer-0", "training") == [(12.5, 14.5), (17.5, 19.5), (57.5, 59.5)]
    assert of(story, "trainer-0", "publishing") == [(14.5, 15), (19.5, 20), (59.5, 60)]
    assert of(story, "trainer-0", "replaying") == [(53.5, 56)]
    assert of(story, "trainer-0", "checkpoint") == [(20.5, 21)]
    assert of(story, "trainer-0", "saving") == [(21, 24)]


def test_starting_is_from_the_start_of_the_process_until_its_first_step(faulty: RunLayout) -> None:
    assert of(story_of(faulty), "trainer-0", "starting") == [(1, 10), (10, 11.5), (42, 50), (50, 52.5)]


def test_a_worker_waits_when_it_does_nothing_else(faulty: RunLayout) -> None:
    story = story_of(faulty)
    assert of(story, "rollout-1", "generating") == [(10, 14)]
    assert of(story, "rollout-1", "weights") == [(8.5, 9), (15.5, 16)]
    assert of(story, "rollout-1", "waiting") == [(8, 8.5), (9, 10), (14, 15.5), (16, 30), (39, 60)]


def test_lives_end_when_the_controller_saw_it_or_with_the_incarnation(faulty: RunLayout) -> None:
    lives = {(life.process, life.attempt): life for life in story_of(faulty).lives if life.incarnation == 1}
    assert (lives["rollout-1", 1].end_s - BEGIN_S, lives["rollout-1", 1].ended) == (30, "killed by SIGKILL")
    assert (lives["trainer-1", 1].end_s - BEGIN_S, lives["trainer-1", 1].ended) == (42, "")
    assert lives["trainer-0", 2].end_s - BEGIN_S == 60
    assert lives["rollout-1", 1].host == "node-7"


def test_slices_of_a_track_never_overlap(faulty: RunLayout) -> None:
    write(faulty, "trainer-0", 1, (60.2, "train_step", step(5, wait_s=50.0, train_s=9.0)))
    tracks: dict[tuple[str, str], list[Slice]] = {}
    for piece in story_of(faulty).slices:
        if piece.activity != "generating":
            tracks.setdefault((piece.process, piece.track), []).append(piece)
    for pieces in tracks.values():
        pieces.sort(key=lambda piece: piece.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(pieces))


def test_gaps() -> None:
    assert gaps_between([(2, 3), (2.5, 5)], 0, 6) == [(0, 2), (5, 6)]
    assert gaps_between([], 1, 2) == [(1, 2)]
    assert gaps_between([(0, 9)], 1, 2) == []


# -- troubles -------------------------------------------------------------------------------------------------------------


def test_why_did_worker_1_restart(faulty: RunLayout) -> None:
    (found,) = [trouble for trouble in troubles_of(faulty) if trouble.who == "rollout-1"]
    assert found.kind == "died" and found.host == "node-7" and found.said == "out of memory"
    assert found.what == "killed by SIGKILL (injected fault “worker”)"
    assert found.then == (
        "started again after 1.0 s (start 2), ready after 9.0 s; its work (block 4, 5) was handed out again"
    )


def test_a_rank_that_was_ended_with_another_says_with_which(faulty: RunLayout) -> None:
    (found,) = [trouble for trouble in troubles_of(faulty) if trouble.who == "trainer-1"]
    assert (found.kind, found.what) == ("restarted", "started again with trainer-0, which had been killed by SIGKILL")
    assert found.then == "start 2, ready after 8.0 s"


def test_a_trainer_says_from_where_it_went_on(faulty: RunLayout) -> None:
    (before,) = [trouble for trouble in troubles_of(faulty) if trouble.who == "trainer-0"]
    assert before.then == "started again after 2.0 s (start 2), ready after 10.0 s"
    write(faulty, "trainer-0", 1, (60.1, "resume", {"checkpoint": 2, "replays": 1}))
    (after,) = [trouble for trouble in troubles_of(faulty) if trouble.who == "trainer-0"]
    assert after.then == before.then + "; went on from checkpoint 2, steps to replay: 1"


def test_incarnations_stops_and_quarantine_in_order(faulty: RunLayout) -> None:
    found = [(trouble.kind, trouble.what) for trouble in troubles_of(faulty) if trouble.who == "run"]
    assert found == [
        ("incarnation", "incarnation 2 began: lost without a word"),
        ("data", "weights/5 did not count or was broken: torn"),
        ("stopping", "the run was asked to stop: the time limit is near (nodes n1)"),
    ]


def test_what_ends_while_the_run_stops_is_no_trouble(faulty: RunLayout) -> None:
    assert not [t for t in troubles_of(faulty) if t.incarnation == 2 and t.kind == "died"]


def test_a_fault_that_killed_nobody_stands_for_itself(faulty: RunLayout) -> None:
    fired = {"fault": "slow", "process": "trainer-0", "at": "2026-03-01T12:05:00Z"}
    (faulty.events / "fault.slow.fired").write_text(json.dumps(fired))
    assert [t.what for t in troubles_of(faulty) if t.kind == "fault"] == ["injected fault “slow” fired"]


@pytest.mark.parametrize(
    ("event", "fields", "kind", "what"),
    [
        ("waiting_for_space", {"error": "no space in /x"}, "storage", "no space in /x"),
        ("weights_unreachable", {"version": 3, "error": "torn"}, "data", "policy version 3 cannot be rebuilt: torn"),
        (
            "broadcast_failed",
            {"version": 3, "error": "a bucket was not sent"},
            "data",
            "policy version 3 was not broadcast: a bucket was not sent",
        ),
        (
            "episodes_saved",
            {"block": 7, "tokens": 9, "finished": 1, "unfinished": 2},
            "kept",
            "unfinished episodes of block 7 were saved",
        ),
        ("inflight_ignored", {"path": "p", "reason": "r"}, "data", "saved episodes in p were not continued: r"),
        ("regenerating", {"groups": [4, 5]}, "data", "the trajectory file of groups [4, 5] is lost"),
    ],
)
def test_troubles_of_a_role(tmp_path: Path, event: str, fields: dict[str, object], kind: str, what: str) -> None:
    layout = make_layout(tmp_path / "run")
    write(layout, "trainer-0", 1, (3, event, fields))
    (found,) = troubles_of(layout)
    assert (found.who, found.kind, found.what) == ("trainer-0", kind, what)


def test_a_failure_is_told_with_its_text(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    write(layout, "controller-0", 1, (3, "failed", {"error": "no more\nwhat to do: x", "exit_code": 1}))
    (found,) = troubles_of(layout)
    assert (found.kind, found.what, found.said) == ("failed", "no more", "what to do: x")


# -- what cannot be read --------------------------------------------------------------------------------------------------


def test_missing_and_strange_logs_are_told(faulty: RunLayout) -> None:
    faulty.event_log("controller-0", 2).unlink()
    with open(faulty.event_log("trainer-0", 1), "a") as stream:
        stream.write('{"event": "x"}\n{"at": "now", "mono_s": "a", "event": 3}\n[1]\n{torn')
    (faulty.events / "fault.bad.fired").write_text("{")
    gaps = read_evidence(faulty, 2).gaps
    assert [gap.partition(" cannot")[0] for gap in gaps] == [
        "events/trainer-0.i000001.jsonl: 2 lines are not events of this format",
        "events/controller-0.i000002.jsonl is missing or empty: what incarnation 2 did is only partly known",
        "events/fault.bad.fired",
    ]


def test_events_that_anybody_may_have_written(tmp_path: Path) -> None:
    """Fields of other types than expected neither stop the story nor show up as times."""
    layout = make_layout(tmp_path / "run")
    odd = ({}, {"step": "x", "metrics": 3}, {"name": None, "attempt": "two", "quarantined": 4, "exit_code": 1})
    names = (
        "incarnation_started", "process_started", "process_ended", "guest_lost", "stopping", "failed", "ready", "train_step",
        "checkpoint_started", "checkpoint_committed", "weights_activated", "trajectories_committed", "waiting_for_space",
    )  # fmt: skip
    for process in ("controller-0", "trainer-0", "rollout-0", "judge-0"):
        write(layout, process, 1, *((n, name, fields) for n, name in enumerate(names) for fields in odd))
    evidence = read_evidence(layout, 1)
    assert find_troubles(evidence, tell(evidence))


def test_without_events_there_is_no_story(tmp_path: Path) -> None:
    evidence = read_evidence(make_layout(tmp_path / "run"), 0)
    assert (evidence.first_s, evidence.last_s, tell(evidence).slices) == (None, None, ())
