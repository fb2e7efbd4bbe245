"""Which trajectories count: the same answer as a take-over and an audit, for runs in which much has happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import commit_batch, flip, make_batch, make_rejection, make_run, past_incarnation, write_groups

from milesbatch.analysis.counted import count_groups
from milesbatch.analysis.history import read_batch
from milesbatch.analysis.listing import list_files
from milesbatch.analysis.scan import TrajectoryScan
from milesbatch.audit.prove import audit_run
from milesbatch.errors import CorruptArtefactError, FormatVersionError
from milesbatch.records import BatchRecord
from milesbatch.store.layout import RunLayout
from milesbatch.store.survey import read_incarnations, survey
from milesbatch.trajectories.groups import group_refs


def surveyed(layout: RunLayout) -> dict[int, tuple[str, str]]:
    """Group -> (file, fate) as a take-over would see it now."""
    found = survey(layout, read_incarnations(layout))
    groups: dict[int, tuple[str, str]] = {}
    for record in found.batches:
        for ref in (*record.trained, *record.rejected):
            groups[ref.group_id] = (ref.path, str(found.fates.fates[ref.group_id]))
    for name in found.ready_files:
        for ref in group_refs(layout.trajectory(name)):
            groups.setdefault(ref.group_id, (str(name), "pending"))
    return groups


def counted_groups(layout: RunLayout) -> dict[int, tuple[str, str]]:
    counted = count_groups(layout)
    return {
        group: (counted.files[counted.file[at]], str(counted.fate(at) or "pending"))
        for at, group in enumerate(counted.group_id.tolist())
    }


def scanned(layout: RunLayout) -> list[tuple[int, int, str]]:
    """(group, sample, file) of every row of a scan."""
    table = TrajectoryScan(count_groups(layout)).table(["group_id", "sample_index", "file"])
    return [tuple(row.values()) for row in table.to_pylist()]


def test_a_run_with_a_kill_and_a_stale_writer(lives: RunLayout) -> None:
    counted = counted_groups(lives)
    assert counted == surveyed(lives)
    assert [fate for _, fate in counted.values()] == (
        ["trained(1)"] * 4
        + ["trained(2)"] * 4
        + ["trained(3)"] * 4
        + ["trained(4)", "rejected(zero_variance, 4)", "trained(4)", "trained(4)"]
        + ["pending"] * 4
    )
    reasons = count_groups(lives).uncounted
    assert sorted(reasons.values()) == [
        "a later incarnation did not accept what incarnation 1 wrote here",
        "a later incarnation did not accept what incarnation 1 wrote here",
        "another file holds the same groups",
    ]


def test_every_counted_trajectory_is_one_row(lives: RunLayout) -> None:
    rows = scanned(lives)
    assert [(group, sample) for group, sample, _ in rows] == [
        (group, sample) for group in range(20) for sample in (0, 1)
    ]
    files = {group: file for group, (file, _) in counted_groups(lives).items()}
    assert all(files[group] == file for group, _, file in rows)


def test_the_audit_counts_the_same(lives: RunLayout) -> None:
    verdict = audit_run(lives)
    counted = count_groups(lives)
    fates = [str(counted.fate(at) or "pending").partition("(")[0] for at in range(len(counted.group_id))]
    assert {name: fates.count(name) for name in ("trained", "rejected", "pending")} == {
        name: getattr(verdict.groups, name) for name in ("trained", "rejected", "pending")
    }
    assert verdict.trajectories == len(scanned(lives))


def remove(pattern: str) -> Callable[[RunLayout], None]:
    def mischief(layout: RunLayout) -> None:
        next(layout.trajectories.glob(pattern)).unlink()

    return mischief


def damage(pattern: str) -> Callable[[RunLayout], None]:
    return lambda layout: flip(next(layout.trajectories.glob(pattern)), 100)


def drop_records(step: int) -> Callable[[RunLayout], None]:
    return lambda layout: layout.batch(step).unlink()


def consumed_file_with_an_open_group(layout: RunLayout) -> None:
    refs = write_groups(layout, [20, 21], version=3, incarnation=2)
    commit_batch(layout, 5, refs[:1], 2)
    write_groups(layout, [21], version=3, incarnation=2, worker="rollout-2")


def one_more_life(layout: RunLayout) -> None:
    assert past_incarnation(layout) == 3
    write_groups(layout, [30, 31], version=3, incarnation=2)
    write_groups(layout, [30, 31], version=3, incarnation=3)


def strangers(layout: RunLayout) -> None:
    (layout.trajectories / "notes.txt").write_text("hello")
    (layout.trajectories / ".tmp-1-abc").write_bytes(b"half")
    (layout.quarantine / next(layout.trajectories.glob("*.arrow")).name).write_bytes(b"")


@pytest.mark.parametrize(
    "mischief",
    [
        damage("000016-*i000002*"),
        damage("000018-*rollout-0*"),
        remove("000016-*i000002*"),
        drop_records(4),
        consumed_file_with_an_open_group,
        one_more_life,
        strangers,
    ],
    ids=["damaged", "first of two damaged", "gone", "no record of step 4", "half consumed", "third life", "strangers"],
)
def test_whatever_happens_the_answer_is_that_of_a_take_over(
    lives: RunLayout, mischief: Callable[[RunLayout], None]
) -> None:
    mischief(lives)
    assert counted_groups(lives) == surveyed(lives)
    rows = [(group, sample) for group, sample, _ in scanned(lives)]
    assert len(rows) == len(set(rows)) == 2 * len(counted_groups(lives))


def test_a_file_that_a_record_names_and_that_is_damaged_costs_its_own_rows(lives: RunLayout) -> None:
    path = next(lives.trajectories.glob("000004-*"))
    flip(path, 200)
    scan = TrajectoryScan(count_groups(lives))
    groups = set(scan.table(["group_id"])["group_id"].to_pylist())
    assert groups == set(range(20)) - {4, 5}
    assert [path.name in error.what and "is damaged" in error.what for error in scan.errors] == [True]
    list(scan.batches(["reward"]))
    assert len(scan.errors) == 1, "the same damage is told once"


def test_a_file_that_is_gone_is_replaced_by_one_of_the_same_content(lives: RunLayout) -> None:
    lost = next(lives.trajectories.glob("000004-*"))
    lost.unlink()
    write_groups(lives, [4, 5], version=0, worker="rollout-5", incarnation=2)
    counted = count_groups(lives)
    assert [row for row in scanned(lives) if row[0] in (4, 5)] == [
        (group, sample, next(lives.trajectories.glob("000004-*rollout-5*")).name)
        for group in (4, 5)
        for sample in (0, 1)
    ]
    assert TrajectoryScan(counted).errors == []


def test_a_file_that_is_gone_without_another_is_an_error(lives: RunLayout) -> None:
    lost = next(lives.trajectories.glob("000004-*"))
    lost.unlink()
    scan = TrajectoryScan(count_groups(lives))
    assert scan.table(["group_id"]).num_rows == 36
    assert [f"{lost} is missing" == error.what for error in scan.errors] == [True]


def test_a_pending_file_that_goes_while_it_is_read_is_no_error(lives: RunLayout) -> None:
    scan = TrajectoryScan(count_groups(lives))
    next(lives.trajectories.glob("000016-*i000002*")).unlink()
    assert scan.table(["group_id"]).num_rows == 36
    assert scan.errors == []


def test_a_record_that_is_damaged_is_reported_and_later_ones_count(lives: RunLayout) -> None:
    lives.batch(2).write_bytes(lives.batch(2).read_bytes()[:-20])
    counted = count_groups(lives)
    assert counted.last_step == 4
    assert [step.step for step in counted.steps] == [1, 3, 4]
    assert [lives.batch(2).name in error.what for error in counted.errors] == [True]


def test_a_record_of_a_fenced_incarnation_does_not_count(lives: RunLayout) -> None:
    refs = write_groups(lives, [40], version=3)
    record = make_batch(5, refs, incarnation=1)
    lives.batch(5).write_bytes(record.to_bytes())
    assert count_groups(lives).last_step == 4
    assert 40 not in counted_groups(lives)


def test_a_damaged_incarnation_is_reported_and_the_rest_shown(lives: RunLayout) -> None:
    flip(lives.incarnation(2), 40)
    counted = count_groups(lives)
    assert [lives.incarnation(2).name in error.what for error in counted.errors] == [True]
    assert len(counted.steps) == 4


def test_an_empty_run_and_a_copy_of_what_is_read(tmp_path: Path, lives: RunLayout) -> None:
    assert counted_groups(make_run(tmp_path / "empty")) == {}
    copy = RunLayout(tmp_path / "copy")
    for place in ("trajectories", "batches", "incarnations"):
        shutil.copytree(lives.root / place, copy.root / place)
    assert counted_groups(copy) == counted_groups(lives)
    assert count_groups(RunLayout(tmp_path / "nowhere")).files == []


def test_a_record_that_names_no_file_at_all(lives: RunLayout) -> None:
    commit_batch(lives, 5, [], 2, [make_rejection(50)])
    scan = TrajectoryScan(count_groups(lives))
    assert scan.table(["group_id"]).num_rows == 40
    assert ["x.arrow is missing" in error.what for error in scan.errors] == [True]
    listed, errors = list_files(count_groups(lives))
    assert len(listed) == len(list(lives.trajectories.glob("*.arrow"))) and len(errors) == 1
    assert count_groups(lives).file_table().num_rows == len(listed) + 1


# -- records, quickly -------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_the_slow_way_reads_it(lives: RunLayout) -> None:
    for step in range(1, 5):
        path = lives.batch(step)
        assert read_batch(path) == BatchRecord.from_bytes(path.read_bytes(), str(path))
    assert read_batch(lives.batch(9)) is None


def test_any_flipped_bit_of_a_record_is_found(lives: RunLayout) -> None:
    path = lives.batch(4)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 7):
        data = bytearray(whole)
        data[offset] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(CorruptArtefactError):
            read_batch(path)
    path.write_bytes(whole + b" ")
    with pytest.raises(CorruptArtefactError):
        read_batch(path)


def test_a_record_of_a_newer_format_is_not_damage(lives: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("milesbatch.records.FORMAT_VERSION", (99, 0))
        data = make_batch(5, []).to_bytes()
    lives.batch(5).write_bytes(data)
    with pytest.raises(FormatVersionError, match="newer"):
        count_groups(lives)
