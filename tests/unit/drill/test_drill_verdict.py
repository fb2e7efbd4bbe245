"""What a drill says: the JSON keys that stay, the page, the words, and the exit code of bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import grow, make_run, past_incarnation

from milesbatch.drill.conduct import judge
from milesbatch.drill.drive import Driven
from milesbatch.drill.evidence import Fired, outcome_of, read_fired, unconsumed_files
from milesbatch.drill.page import cells, page
from milesbatch.drill.plan import DrillRun
from milesbatch.drill.verdict import DrillVerdict, FaultVerdict
from milesbatch.faults.injector import Injector
from milesbatch.faults.plan import Fault, FaultPlan
from milesbatch.store.layout import RunLayout

GOOD = FaultVerdict(
    fault="rank0",
    run="r",
    what="trainer-0: killed at <trainer.recorded>",
    fired=True,
    detected_s=0.25,
    resumed_s=7.5,
    steps_replayed=2,
    groups_lost=0,
    groups_repeated=0,
    groups_generated_again=4,
    digest_equal=True,
    audit_ok=True,
    starts=1,
    problems=(),
)
LOST = replace(GOOD, fault="rank1", groups_lost=1, digest_equal=False, problems=("1 groups <are> lost",))
SILENT = replace(GOOD, fault="rank2", fired=False, detected_s=None, problems=("did not fire",))


def drilled(*faults: FaultVerdict, unbroken: tuple[str, ...] = ()) -> DrillVerdict:
    return DrillVerdict("tiny", ("steps: 80 -> 8",), 8, True, "xxh128:0", unbroken, faults, 12.3456)


def test_the_json_keys_that_stay() -> None:
    body = json.loads(json.dumps(drilled(GOOD, LOST).to_json()))
    assert body["ok"] is False
    times = {"detected_s", "resumed_s", "steps_replayed"}
    keys = {"fault", "fired", "groups_lost", "groups_repeated", "digest_equal", "ok"} | times
    assert all(keys <= set(fault) for fault in body["faults"])
    assert [fault["ok"] for fault in body["faults"]] == [True, False]
    assert (body["seconds"], body["small_form"]) == (12.3, ["steps: 80 -> 8"])


def test_ok_means_every_one() -> None:
    assert drilled(GOOD).ok
    assert not drilled(GOOD, SILENT).ok
    assert not drilled(GOOD, LOST).ok
    assert not drilled(GOOD, unbroken=("audit: damaged",)).ok
    assert not drilled().ok


def test_the_words() -> None:
    assert [fault.word for fault in (GOOD, LOST, SILENT)] == ["good", "BROKEN", "did not fire"]
    assert cells(GOOD)[2:5] == ("good", "0.2", "7.5")
    assert cells(SILENT)[3] == "-"
    assert "DIFFERS" in cells(LOST)


def test_the_page_needs_nothing_else() -> None:
    text = page(drilled(GOOD, LOST, SILENT))
    assert "1 groups &lt;are&gt; lost" in text and "<are>" not in text
    assert "&lt;trainer.recorded&gt;" in text
    assert not re.search(r"(src|href)=|https?://|@import|<script", text)
    assert text.count("<tr>") == 4
    assert "not well" in text and "every promise held" in page(drilled(GOOD))


# -- judging real files ---------------------------------------------------------------------------------------------

STEPS = 3


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    found = make_run(tmp_path / "run")
    past_incarnation(found)
    grow(found, STEPS)
    return found


RUN = DrillRun(
    name="r",
    faults=(
        Fault(name="f", role="trainer-0", point="trainer.recorded", action="kill"),
        Fault(name="g", role="rollout", point="rollout.leased", action="kill"),
    ),
)


def driven(layout: RunLayout, **changes: object) -> Driven:
    fired = {"f": Fired("trainer-0", 1, 2.0), "g": Fired("rollout-0", 1, 3.0)}
    return replace(Driven(layout, fired, (0,), {}, {}, None, 1.0), **changes)  # type: ignore[arg-type]


def test_a_run_that_equals_the_unbroken_one_keeps_its_promises(layout: RunLayout) -> None:
    found = outcome_of(layout, STEPS)
    assert (len(found.digests), found.repeated) == (STEPS + 1, 0)
    verdicts = judge(driven(layout), RUN, found, STEPS, True)
    differences = [problem for v in verdicts for problem in v.problems if not problem.startswith("audit")]
    assert differences == []
    assert all(verdict.digest_equal for verdict in verdicts)


@pytest.mark.parametrize("what", ["digests", "fates"])
def test_a_tampered_reference_is_a_broken_promise(layout: RunLayout, what: str) -> None:
    found = outcome_of(layout, STEPS)
    if what == "digests":
        tampered = replace(found, digests={**found.digests, 2: "xxh128:" + "0" * 32})
    else:
        tampered = replace(found, fates={**found.fates, 10_000: "trained(3)"})
    verdicts = judge(driven(layout), RUN, tampered, STEPS, True)
    assert [verdict.ok for verdict in verdicts] == [False, False]
    words = "version 2" if what == "digests" else "first is 10000"
    assert all(any(words in problem for problem in verdict.problems) for verdict in verdicts)
    assert {verdict.word for verdict in verdicts} == {"BROKEN"}


def test_what_did_not_fire_is_not_well(layout: RunLayout) -> None:
    found = outcome_of(layout, STEPS)
    first, second = judge(driven(layout, fired={"g": Fired("rollout-0", 1, 3.0)}), RUN, found, STEPS, True)
    assert (first.fired, first.ok, first.word) == (False, False, "did not fire")
    assert first.problems[0] == "did not fire"
    assert second.fired


def test_a_run_that_did_not_finish_and_a_fault_that_went_wrong(layout: RunLayout) -> None:
    found = outcome_of(layout, STEPS)
    given = driven(layout, failure="not finished after 8 starts", problems={"g": "the zombie still ran"})
    first, second = judge(given, RUN, found, STEPS, True)
    assert "not finished after 8 starts" in first.problems and "the zombie still ran" not in first.problems
    assert second.problems[:2] == ("the zombie still ran", "not finished after 8 starts")


def test_the_audit_counts(layout: RunLayout) -> None:
    found = outcome_of(layout, STEPS)
    path = next(layout.trajectories.glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-1])
    verdicts = judge(driven(layout), RUN, found, STEPS, True)
    assert all(verdict.audit_ok is False for verdict in verdicts)
    said = [problem for problem in verdicts[0].problems if problem.startswith("audit: ")]
    assert 1 <= len(said) <= 4 and all(problem in verdicts[1].problems for problem in said)


def test_records_of_fired_faults_are_read_back(layout: RunLayout) -> None:
    assert read_fired(layout, "f") is None
    fault = Fault(name="f", role="trainer-0", point="link:batches", action="flip")
    Injector(FaultPlan(faults=(fault,)), "trainer-0", layout)._fire(fault, layout.batch(2).resolve())
    record = read_fired(layout, "f")
    assert record is not None and (record.process, record.path) == ("trainer-0", "batches/000002.json")
    (layout.events / "fault.torn.fired").write_text("")
    assert read_fired(layout, "torn") is None


def test_unconsumed_files_are_those_without_a_fate(layout: RunLayout) -> None:
    used = {group.split("(")[0] for group in outcome_of(layout, STEPS).fates.values()}
    assert used == {"trained"}
    stranger = layout.trajectories / "000900-000901.i000001.rollout-0.0123456789abcdef.arrow"
    before = unconsumed_files(layout)
    stranger.write_bytes(b"x")
    assert unconsumed_files(layout) == sorted([*before, stranger])


# -- the command ----------------------------------------------------------------------------------------------------

TINY = Path(__file__).parents[3] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no.yaml"], ["no.yaml"]),
        ([str(TINY), "--set", "trainer.rank=4"], ["trainer.rank", "ranks"]),
        ([str(TINY), "--faults", "no.yaml"], ["no.yaml", "docs/faults.md"]),
        ([str(TINY), "--faults", "bad.yaml"], ["faults[0].role", "nobody"]),
        ([str(TINY), "--faults", "set.yaml"], ["rollout.lease"]),
        ([str(TINY), "--keep", "full"], ["full", "empty directory"]),
        ([str(TINY), "--report", "nowhere/x.html"], ["nowhere"]),
    ],
)
def test_bad_input_starts_nothing(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "bad.yaml").write_text("faults: [{name: a, role: nobody, point: wire.send, action: kill}]")
    (tmp_path / "set.yaml").write_text("runs: [{name: r, set: [rollout.lease=1], acts: [{name: a, act: power_cut}]}]")
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "milesbatch.cli.main", "drill", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=None)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr and "what to do: " in ended.stderr
    assert ended.stdout == ""
    for word in words:
        assert word in ended.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_recipe_that_names_what_is_not_there_is_bad_input_too(tmp_path: Path) -> None:
    """Only the run itself finds that; the drill passes on what it said and what it exits with."""
    sets = ("--set", "model.kind=pretrained", "--set", "model.path=/no/such/model")
    command = [sys.executable, "-m", "milesbatch.cli.main", "drill", str(TINY), *sets, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "/no/such/model" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout == ""
