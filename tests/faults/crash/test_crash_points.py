"""A run that is killed at any point, by any crash, ends like one that was not. ``make crash`` tries all points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_search import Recording, Report, record, search, search_twice, undisturbed

EVERY = 97
EVERY_TWICE = 7
MUTATION_KINDS = {
    "create",
    "write",
    "append",
    "sync_file",
    "sync_directory",
    "link",
    "rename",
    "unlink",
    "make_directory",
    "remove_directory",
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    root = tmp_path_factory.mktemp("crash")
    (root / "whole").mkdir()
    (root / "noted").mkdir()
    yield Recording(undisturbed(root / "whole"), record(root / "noted"))


def check(report: Report) -> None:
    print(report)
    assert report.failures == [], f"{report}; the first:\n" + "\n".join(report.failures[:5])


def test_the_recorded_run_holds_what_must_be_crashed(recording: Recording) -> None:
    mutations = recording.mutations
    assert {mutation.kind for mutation in mutations} == MUTATION_KINDS
    linked = Counter(Path(mutation.target).parts[1] for mutation in mutations if mutation.kind == "link")
    assert linked["incarnations"] == 3
    assert linked["batches"] == 7
    assert linked["trajectories"] == 15, "14 blocks, one of them twice"
    commits = [mutation.target for mutation in mutations if mutation.kind == "link"]
    assert sum("keyframe" in target for target in commits) == 4
    assert [target.split("/")[2] for target in commits if "checkpoints" in target] == [
        "000002",
        "000003",
        "000004",
        "000006",
        "000007",
    ]
    retired = [m.path for m in mutations if m.kind == "unlink" and m.path.endswith("manifest.json")]
    assert retired == [f"run/checkpoints/{step}/manifest.json" for step in ("000002", "000003", "000004")]
    weights = [target.split("/")[2] for target in commits if target.endswith("retired.json")]
    assert weights == ["000000", "000001", "000002", "000003"]
    assert commits.index("run/weights/000001/retired.json") < commits.index("run/checkpoints/000007/manifest.json")
    assert any(mutation.kind == "rename" and "quarantine" in mutation.target for mutation in mutations)
    late = [
        commits.index(f"run/weights/{v:06d}/manifest.json") > commits.index(f"run/batches/{v + 1:06d}.json")
        for v in (4, 5)
    ]
    assert all(late), "a version may be committed only after the record of the next step"
    assert commits.index("run/weights/000002/manifest.json") < commits.index("run/batches/000003.json"), "or before"
    trained = {fate.split()[1] for fate in recording.ending.fates if "trained" in fate}
    assert trained == {f"trained({step})" for step in range(1, 8)}, "every step must learn from something"
    assert len(set(recording.ending.digests)) == 8


def test_some_crash_points(recording: Recording) -> None:
    check(search(recording, range(0, len(recording.mutations) + 1, EVERY)))


def test_some_double_crashes(recording: Recording) -> None:
    check(search_twice(recording, range(0, len(recording.mutations), EVERY_TWICE)))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_crash_point(recording: Recording, capfd: pytest.CaptureFixture[str]) -> None:
    report = search(recording, processes=2)
    with capfd.disabled():
        print(f"\ncrash points: {report}")
    check(report)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_double_crash(recording: Recording, capfd: pytest.CaptureFixture[str]) -> None:
    report = search_twice(recording, processes=2)
    with capfd.disabled():
        print(f"\ndouble crashes: {report}")
    check(report)
