"""An audit finds every broken promise, names the file, and finds nothing in a sound run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_runs import (
    STEPS,
    artefacts,
    checkpoint,
    edit,
    generate,
    live,
    read,
    swap,
    trained_file,
    weights_digest,
)
from builders import commit_batch, flip, make_rejection, past_incarnation

from milesbatch.audit.prove import audit_run
from milesbatch.errors import FormatVersionError
from milesbatch.records import BatchRecord, CheckpointManifest, Seal, WeightsManifest, digest_bytes
from milesbatch.store.durable import remove_tree
from milesbatch.store.layout import RunLayout, TrajectoryName


def violations(layout: RunLayout) -> dict[str, str]:
    """Path -> kind of the first violation of it."""
    found: dict[str, str] = {}
    for violation in audit_run(layout).violations:
        found.setdefault(violation.path, violation.kind)
    return found


def name(layout: RunLayout, path: Path) -> str:
    return str(path.relative_to(layout.root))


def notes(layout: RunLayout) -> dict[str, str]:
    return {note.path: note.kind for note in audit_run(layout).notes}


# -- sound ----------------------------------------------------------------------------------------------------------


def test_a_sound_run(layout: RunLayout) -> None:
    verdict = audit_run(layout)
    assert verdict.violations == ()
    assert verdict.notes == ()
    body = verdict.to_json()
    assert body["ok"] is True
    assert body["groups"] == {"trained": 4 * STEPS, "rejected": 0, "pending": 0, "lost": 0, "repeated": 0}
    assert body["versions"] == {"first": 0, "last": STEPS, "verified": STEPS + 1}
    assert (body["incarnations"], body["steps"], body["checkpoints"]) == (2, STEPS, [4, 6])
    assert body["trajectories"] == 8 * STEPS
    assert body["checked"] == {
        "files": len(artefacts(layout)),
        "bytes": sum(p.stat().st_size for p in artefacts(layout)),
    }


def test_a_sound_relaxed_run(relaxed: RunLayout) -> None:
    verdict = audit_run(relaxed)
    assert (verdict.violations, verdict.notes) == ((), ())


def test_an_audit_needs_no_torch_and_writes_nothing(layout: RunLayout) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in layout.root.rglob("*")}
    code = (
        "import sys\nfrom pathlib import Path\nfrom milesbatch.audit.prove import audit_run\nimport milesbatch.cli.audit\n"
        "from milesbatch.store.layout import RunLayout\n"
        f"assert audit_run(RunLayout(Path({str(layout.root)!r}))).ok\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in layout.root.rglob("*")}


def test_runs_that_stopped_between_commits_are_sound(layout: RunLayout) -> None:
    """The crash states of the protocol: no checkpoint, then no version, then no batch record of the last step."""
    remove_tree(layout.checkpoint(STEPS))
    assert audit_run(layout).ok
    remove_tree(layout.weights_version(STEPS))
    assert audit_run(layout).ok
    record = read(BatchRecord, layout.batch(STEPS))
    layout.batch(STEPS).unlink()
    verdict = audit_run(layout)
    assert verdict.ok
    assert verdict.groups.pending == len(record.trained)


# -- damage of each kind of file ------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found_and_named(layout: RunLayout) -> None:
    """At the start, in the middle and at the end of every committed file."""
    flips = 0
    for path in artefacts(layout):
        content = path.read_bytes()
        for offset in sorted({0, len(content) // 2, len(content) - 1}):
            flip(path, offset, 1 << flips % 8)
            assert name(layout, path) in violations(layout), f"byte {offset} of {path}"
            path.write_bytes(content)
            flips += 1
    assert flips > 100
    assert audit_run(layout).ok


def test_every_truncation_is_found_and_named(layout: RunLayout) -> None:
    for path in artefacts(layout):
        content = path.read_bytes()
        for size in {0, len(content) - 1}:
            path.write_bytes(content[:size])
            assert name(layout, path) in violations(layout), f"{path} cut to {size} bytes"
        path.write_bytes(content)


def test_every_deletion_is_found_and_named(layout: RunLayout) -> None:
    """But that of the newest checkpoint's manifest: it is what a crash before its commit leaves, and the log is no proof."""
    exempt = layout.checkpoint_manifest(STEPS), layout.checkpoint_manifest(STEPS - 2)
    for path in artefacts(layout):
        content = path.read_bytes()
        path.unlink()
        if path in exempt:
            assert audit_run(layout).ok
            assert notes(layout)[name(layout, path.parent)] == "leftover"
        else:
            assert name(layout, path) in violations(layout), f"{path} deleted"
        path.write_bytes(content)
    layout.checkpoint_manifest(STEPS).unlink()
    assert notes(layout)[name(layout, layout.checkpoint_manifest(STEPS))] == "diagnosis"


def test_a_sealed_checkpoint_that_no_newer_one_replaced_must_be_there(layout: RunLayout) -> None:
    past_incarnation(layout)
    path = layout.checkpoint_manifest(STEPS)
    path.unlink()
    assert violations(layout)[name(layout, path)] == "missing"


@pytest.mark.parametrize(
    "pair",
    [
        lambda run: (run.batch(2), run.batch(3)),
        lambda run: (run.incarnation(1), run.incarnation(2)),
        lambda run: (run.weights_manifest(1), run.weights_manifest(2)),
        lambda run: tuple(next(run.weights_version(v).glob("*.safetensors")) for v in (1, 2)),
        lambda run: (run.checkpoint_manifest(4), run.checkpoint_manifest(6)),
        lambda run: tuple(next(run.checkpoint(s).rglob("model.distcp")) for s in (4, 6)),
        lambda run: (trained_file(run, 2), trained_file(run, 3)),
        lambda run: (run.model / "config.json", run.model / "tokenizer.json"),
    ],
)
def test_swapped_files(layout: RunLayout, pair: Callable[[RunLayout], tuple[Path, Path]]) -> None:
    one, other = pair(layout)
    swap(one, other)
    assert {name(layout, one), name(layout, other)} <= set(violations(layout))


def test_a_file_that_cannot_be_read_is_a_violation(layout: RunLayout) -> None:
    path = layout.batch(2)
    path.unlink()
    path.mkdir()
    assert violations(layout)[name(layout, path)] == "unreadable"


def test_a_newer_format_stops_the_audit(layout: RunLayout) -> None:
    edit(layout.batch(2), lambda body: body.update(format=[99, 0]))
    with pytest.raises(FormatVersionError, match=r"99 is newer"):
        audit_run(layout)


# -- fates ----------------------------------------------------------------------------------------------------------


def change_groups(layout: RunLayout, step: int, change: Callable[[list[dict[str, Any]]], None]) -> str:
    edit(layout.batch(step), lambda body: change(body["trained"]))
    return name(layout, layout.batch(step))


def test_a_group_that_is_trained_twice(layout: RunLayout) -> None:
    earlier = read(BatchRecord, layout.batch(1)).trained[0].model_dump(mode="json")
    path = change_groups(layout, 2, lambda groups: groups.insert(0, earlier))
    assert violations(layout)[path] == "fate"
    assert audit_run(layout).groups.repeated == 1


def test_a_group_that_is_trained_and_rejected(relaxed: RunLayout) -> None:
    group = read(BatchRecord, relaxed.batch(1)).trained[0]
    rejection = {"group_id": group.group_id, "reason": "failed", "path": group.path, "digest": group.digest}
    edit(relaxed.batch(3), lambda body: body["rejected"].append(rejection))
    assert violations(relaxed)[name(relaxed, relaxed.batch(3))] == "fate"


def test_a_skipped_group_in_bitwise_mode(layout: RunLayout) -> None:
    path = change_groups(layout, 2, lambda groups: groups.pop(1))
    assert violations(layout)[path] == "lost"
    assert audit_run(layout).groups.lost == 1


def test_a_skipped_group_in_relaxed_mode_is_pending(relaxed: RunLayout) -> None:
    change_groups(relaxed, 2, lambda groups: groups.pop(1))
    verdict = audit_run(relaxed)
    assert (verdict.ok, verdict.groups.pending, verdict.groups.lost) == (True, 1, 0)


def test_a_group_of_another_step_in_bitwise_mode(layout: RunLayout) -> None:
    refs = generate(layout, range(40, 42), version=1, incarnation=2)
    path = change_groups(layout, 6, lambda groups: groups.append(refs[0].model_dump(mode="json")))
    assert violations(layout)[path] in ("fate", "mismatch")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(stream_position=99),
        lambda body: body["trained"].reverse(),
        lambda body: body["trained"][0].update(digest=digest_bytes(b"other")),
        lambda body: body["trained"][0].update(version_min=0, version_max=0),
        lambda body: body["trained"][0].update(samples=3),
        lambda body: body["trained"][0].update(path=body["trained"][3]["path"], digest=body["trained"][3]["digest"]),
        lambda body: body.update(step=6),
    ],
)
def test_a_batch_record_that_says_something_else(layout: RunLayout, change: Callable[[dict[str, Any]], None]) -> None:
    edit(layout.batch(5), change)
    assert name(layout, layout.batch(5)) in violations(layout)


def test_the_checkpoint_repeats_the_fates(layout: RunLayout) -> None:
    edit(layout.checkpoint_manifest(4), lambda body: body["fates"].update({"9": "rejected(stale, 3)"}))
    assert violations(layout) == {name(layout, layout.checkpoint_manifest(4)): "fate"}


def test_rejected_groups_are_counted_with_their_reason(relaxed: RunLayout) -> None:
    live(relaxed, [], STEPS)
    refs = generate(relaxed, range(24, 28), version=6, incarnation=3)
    stale = make_rejection(27, "zero_variance").model_copy(update={"path": refs[3].path, "digest": refs[3].digest})
    commit_batch(relaxed, 7, refs[:3], 3, [stale])
    verdict = audit_run(relaxed)
    assert verdict.violations == ()
    assert (verdict.groups.rejected, verdict.rejected_by_reason) == (1, {"zero_variance": 1})


# -- versions -------------------------------------------------------------------------------------------------------


def next_step(layout: RunLayout, *, version: int, **changes: Any) -> Path:
    """A third life trains step 7 on groups made by ``version``; returns their file."""
    live(layout, [], STEPS)
    refs = generate(layout, range(24, 28), version=version, incarnation=3, **changes)
    commit_batch(layout, 7, refs, 3)
    return layout.trajectory(refs[0].path)


@pytest.mark.parametrize(("version", "kind"), [(4, "stale"), (5, None), (6, None)])
def test_staleness_in_relaxed_mode(relaxed: RunLayout, version: int, kind: str | None) -> None:
    path = next_step(relaxed, version=version)
    assert violations(relaxed) == ({} if kind is None else {name(relaxed, path): kind})


@pytest.mark.parametrize(("version", "kind"), [(4, "stale"), (5, None), (6, "version")])
def test_staleness_in_bitwise_mode_is_exact(layout: RunLayout, version: int, kind: str | None) -> None:
    path = next_step(layout, version=version)
    assert violations(layout) == ({} if kind is None else {name(layout, path): kind})


def test_a_version_that_was_used_before_it_existed(relaxed: RunLayout) -> None:
    path = next_step(relaxed, version=7)
    assert violations(relaxed)[name(relaxed, path)] == "version"


def test_a_group_of_its_own_step_s_version(relaxed: RunLayout) -> None:
    """Version 3 exists, but not before step 3 had ended."""
    layout = relaxed
    refs = generate(layout, range(24, 28), version=3, incarnation=1)
    edit(layout.batch(3), lambda body: body["trained"].extend(ref.model_dump(mode="json") for ref in refs))
    assert violations(layout)[name(layout, layout.trajectory(refs[0].path))] == "version"


def test_weights_digest_of_another_version(layout: RunLayout) -> None:
    path = next_step(layout, version=5, weights_digest=weights_digest(layout, 4))
    assert violations(layout) == {name(layout, path): "version"}


def test_seeds_that_are_not_the_run_s(layout: RunLayout) -> None:
    path = next_step(layout, version=5, seed=17)
    assert violations(layout) == {name(layout, path): "mismatch"}


def test_a_renamed_trajectory_file(layout: RunLayout) -> None:
    path = trained_file(layout, 2)
    parsed = TrajectoryName.parse(path.name)
    path.rename(layout.trajectory(TrajectoryName(100, 101, 1, parsed.worker, parsed.tag)))
    assert violations(layout)[name(layout, path)] == "missing"
    assert audit_run(layout).groups.lost == 2


# -- weights and checkpoints, signed again ---------------------------------------------------------------------------


def test_a_wrong_tensor_digest_in_a_signed_manifest(layout: RunLayout) -> None:
    edit(layout.weights_manifest(2), lambda body: body["tensors"][0].update(digest=digest_bytes(b"other")))
    assert violations(layout)[name(layout, layout.weights_manifest(2))] in ("mismatch", "chain")


def test_a_wrong_weights_digest_in_a_signed_manifest(layout: RunLayout) -> None:
    edit(layout.weights_manifest(4), lambda body: body.update(weights_digest=digest_bytes(b"other")))
    assert violations(layout)[name(layout, layout.weights_manifest(4))] == "mismatch"


def test_a_delta_that_gives_other_weights_than_recorded(layout: RunLayout) -> None:
    """A consistent manifest (digests and all) over a payload that does not give them: only applying it shows that."""
    from milesbatch.weights.digest import entries_digest

    manifest = read(WeightsManifest, layout.weights_manifest(5))
    entries = [entry.model_copy(update={"digest": digest_bytes(entry.name.encode())}) for entry in manifest.tensors]
    changed = manifest.model_copy(update={"tensors": tuple(entries), "weights_digest": entries_digest(entries)})
    layout.weights_manifest(5).write_bytes(changed.to_bytes())
    found = violations(layout)
    assert found[name(layout, layout.weights_manifest(5))] == "chain"
    assert audit_run(layout).verified_versions == STEPS  # version 6 has a keyframe


def test_versions_after_a_damaged_delta_cannot_be_proven(layout: RunLayout) -> None:
    payload = next(layout.weights_version(1).glob("delta*"))
    flip(payload)
    verdict = audit_run(layout)
    assert violations(layout) == {name(layout, payload): "damaged", name(layout, layout.weights_manifest(2)): "chain"}
    assert verdict.verified_versions == STEPS - 1


def test_a_checkpoint_of_other_weights(layout: RunLayout) -> None:
    edit(layout.checkpoint_manifest(6), lambda body: body.update(weights_digest=digest_bytes(b"other")))
    assert violations(layout) == {name(layout, layout.checkpoint_manifest(6)): "mismatch"}


def test_recorded_divergences_are_notes(layout: RunLayout) -> None:
    edit(layout.checkpoint_manifest(6), lambda body: body.update(divergences=[5]))
    verdict = audit_run(layout)
    assert (verdict.ok, verdict.divergences) == (True, (5,))
    assert [note.kind for note in verdict.notes] == ["divergence"]


# -- incarnations and seals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"last_batch": 9},
        {"last_batch": 2},
        {"last_version": 5},
        {"last_version": 2},
        {"checkpoints": [7]},
        {"checkpoints": [2, 6]},
        {"trajectories": ["x.arrow"]},
        {"trajectories": []},
    ],
)
def test_a_seal_that_does_not_fit_what_exists(layout: RunLayout, changes: dict[str, Any]) -> None:
    edit(layout.incarnation(2), lambda body: body["seal"].update(changes))
    assert not audit_run(layout).ok


def test_the_first_incarnation_seals_nothing(layout: RunLayout) -> None:
    seal = Seal(last_batch=1, last_version=1, checkpoints=(), trajectories=()).model_dump(mode="json")
    edit(layout.incarnation(1), lambda body: body.update(seal=seal))
    assert violations(layout)[name(layout, layout.incarnation(1))] == "seal"


def test_artefacts_of_a_zombie_are_notes_until_something_uses_them(layout: RunLayout) -> None:
    """Incarnation 2 goes on after incarnation 3 has sealed the run."""
    live(layout, [], STEPS)
    refs = generate(layout, range(24, 28), version=5, incarnation=2)
    record = commit_batch(layout, 7, refs, 2)
    verdict = audit_run(layout)
    assert (verdict.ok, verdict.steps) == (True, STEPS)
    assert notes(layout) == {
        name(layout, layout.batch(7)): "fenced",
        name(layout, layout.trajectory(refs[0].path)): "orphan",
    }
    edit(layout.batch(7), lambda body: body.update(incarnation=3))  # the newest incarnation uses a fenced file
    assert record.step == 7
    assert violations(layout) == {name(layout, layout.batch(7)): "fenced"}


def test_records_on_top_of_a_fenced_one(layout: RunLayout) -> None:
    live(layout, [], STEPS)
    commit_batch(layout, 7, generate(layout, range(24, 28), version=5, incarnation=2), 2)
    commit_batch(layout, 8, generate(layout, range(28, 32), version=6, incarnation=3), 3)
    assert violations(layout)[name(layout, layout.batch(7))] == "fenced"


def test_a_zombie_s_checkpoint_is_a_note(layout: RunLayout) -> None:
    remove_tree(layout.checkpoint(6))
    past_incarnation(layout)
    edit(layout.checkpoint_manifest(4), lambda body: body.update(incarnation=1))
    assert notes(layout)[name(layout, layout.checkpoint_manifest(4))] == "fenced"
    manifest = read(CheckpointManifest, layout.checkpoint_manifest(4))
    assert manifest.incarnation == 1


def test_an_artefact_of_an_incarnation_that_never_was(layout: RunLayout) -> None:
    edit(layout.batch(6), lambda body: body.update(incarnation=3))
    assert violations(layout)[name(layout, layout.incarnation(3))] == "missing"


# -- leftovers ------------------------------------------------------------------------------------------------------


def test_leftovers_and_diagnosis_are_notes(layout: RunLayout) -> None:
    (layout.batches / ".tmp-1-abc").write_bytes(b"half")
    (layout.weights_version(2) / ".tmp-2-abc").write_bytes(b"half")
    (layout.weights_version(2) / "delta.i000001.0123456789abcdef.safetensors").write_bytes(b"x")
    layout.weights_version(9).mkdir()
    (layout.weights_version(9) / "keyframe.i000001.0123456789abcdef.safetensors").write_bytes(b"x")
    (layout.trajectories / "notes.txt").write_text("mine")
    (layout.model / "mine.txt").write_text("mine")
    for path in layout.events.iterdir():
        path.write_bytes(path.read_bytes()[:-30] + b"\xff\xfe{[")
    (layout.quarantine / "batches.000009.json.01234567").write_bytes(b"anything")
    verdict = audit_run(layout)
    assert verdict.ok
    assert {note.kind for note in verdict.notes} == {"leftover", "stranger"}
    assert len(verdict.notes) == 6


def test_a_second_file_of_the_same_groups_is_an_orphan(layout: RunLayout) -> None:
    again = generate(layout, range(0, 2), version=0, incarnation=2)
    verdict = audit_run(layout)
    assert verdict.ok
    assert notes(layout) == {name(layout, layout.trajectory(again[0].path)): "orphan"}
    assert verdict.generated_again == 2


def test_unconsumed_files_of_the_newest_incarnation_are_pending(layout: RunLayout) -> None:
    refs = generate(layout, range(24, 26), version=5, incarnation=2)
    assert audit_run(layout).groups.pending == 2
    flip(layout.trajectory(refs[0].path))
    assert violations(layout) == {name(layout, layout.trajectory(refs[0].path)): "damaged"}


def test_versions_that_wait_to_be_published_again(layout: RunLayout) -> None:
    """Damage that a take-over found: it sealed fewer versions, and was killed before the replay."""
    flip(next(layout.weights_version(4).glob("delta*")))
    flip(next(layout.weights_version(6).glob("keyframe*")))
    past_incarnation(layout)
    verdict = audit_run(layout)
    assert verdict.violations == ()
    assert "awaits-replay" in {note.kind for note in verdict.notes}


def test_a_checkpoint_with_other_facts(layout: RunLayout) -> None:
    remove_tree(layout.checkpoint(6))
    checkpoint(layout, 6, 2, stream_position=99, fates_since=2)
    assert {v.kind for v in audit_run(layout).violations} == {"mismatch", "fate"}
