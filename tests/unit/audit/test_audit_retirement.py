"""Retired versions in an audit: excused by a record that agrees with the rules, and by nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_runs import edit, sound_run
from builders import flip, make_recipe, past_incarnation, publish, unfenced

from milesbatch.audit.chain import Chain
from milesbatch.audit.prove import audit_run, examine
from milesbatch.audit.repair import repair
from milesbatch.audit.verdict import Verdict
from milesbatch.records import WeightsManifest
from milesbatch.store.fence import Fence
from milesbatch.store.layout import RunLayout
from milesbatch.store.takeover import Claimant, take_over
from milesbatch.trainer.retiring import Retired, Retiring
from milesbatch.weights.publisher import Publisher

STEPS = 8
"""Checkpoints 6 and 8 are kept; keyframes 0, 3 and 6; staleness 1: versions 0 to 2 may go."""


def retire(layout: RunLayout, incarnation: int = 2) -> Retired | None:
    return Retiring(layout, make_recipe(), Fence(layout, incarnation)).retire(STEPS, STEPS)


@pytest.fixture(scope="session")
def unretired_run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return sound_run(tmp_path_factory.mktemp("retirement") / "run", steps=STEPS)


@pytest.fixture
def unretired(unretired_run: RunLayout, tmp_path: Path) -> RunLayout:
    return RunLayout(Path(shutil.copytree(unretired_run.root, tmp_path / "unretired")))


@pytest.fixture
def layout(unretired: RunLayout) -> RunLayout:
    assert retire(unretired) == Retired(0, 2, 3)
    return unretired


def kinds(verdict: Verdict) -> list[tuple[str, str]]:
    return [(violation.kind, violation.path) for violation in verdict.violations]


def name(layout: RunLayout, version: int) -> str:
    return str(layout.weights_retirement(version).relative_to(layout.root))


def test_a_run_with_retired_versions_is_sound(layout: RunLayout) -> None:
    verdict = audit_run(layout)
    assert (verdict.violations, verdict.notes) == ((), ())
    assert (verdict.first_version, verdict.last_version, verdict.verified_versions) == (0, STEPS, STEPS - 2)


def test_any_flipped_byte_of_a_retirement_is_found(layout: RunLayout) -> None:
    path = layout.weights_retirement(1)
    for offset in range(0, path.stat().st_size, 29):
        flip(path, offset, 1 << offset % 8)
        assert name(layout, 1) in {path for _, path in kinds(audit_run(layout))}, f"byte {offset}"
        flip(path, offset, 1 << offset % 8)
    assert audit_run(layout).ok


def test_missing_payload_without_a_retirement_is_a_violation(layout: RunLayout) -> None:
    layout.weights_retirement(1).unlink()
    path = layout.weights_manifest(1)
    (ref,) = WeightsManifest.from_bytes(path.read_bytes(), str(path)).files
    assert kinds(audit_run(layout)) == [("missing", f"weights/000001/{ref.path}")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base": 1}, "full copy of version 1"),  # not newer than the version itself
        ({"base": 0}, "full copy of version 0"),
        ({"needed": 2}, "with version 2 needed"),
        ({"checkpoint": 4}, "2 the newest that checkpoint 4 lets go"),
        ({"staleness": 0}, "reckons with staleness 0"),
    ],
)
def test_a_retirement_that_breaks_the_rules_is_a_violation(
    layout: RunLayout, changes: dict[str, Any], says: str
) -> None:
    edit(layout.weights_retirement(1), lambda body: body.update(changes))
    verdict = audit_run(layout)
    assert kinds(verdict) == [("retired", name(layout, 1))]
    assert says in verdict.violations[0].detail


def test_a_retired_version_above_the_base_is_a_violation(layout: RunLayout) -> None:
    """Version 4 is needed by a start from checkpoint 6."""
    layout.weights_retirement(4).write_bytes(layout.weights_retirement(2).read_bytes())
    edit(layout.weights_retirement(4), lambda body: body.update({"version": 4}))
    for path in layout.weights_version(4).glob("*.safetensors"):
        path.unlink()
    assert ("retired", name(layout, 4)) in kinds(audit_run(layout))


def test_a_retirement_of_another_version_is_a_violation(layout: RunLayout) -> None:
    layout.weights_retirement(1).write_bytes(layout.weights_retirement(2).read_bytes())
    assert kinds(audit_run(layout)) == [("mismatch", name(layout, 1))]


def test_without_the_base_nothing_excuses_the_retirement(layout: RunLayout) -> None:
    def without_keyframe(body: dict[str, Any]) -> None:
        body["files"] = [ref for ref in body["files"] if ref["path"] != body["keyframe"]]
        body.update({"artefact": "delta", "keyframe": None})

    edit(layout.weights_manifest(3), without_keyframe)
    for path in layout.weights_version(3).glob("keyframe.*"):
        path.unlink()
    found = kinds(audit_run(layout))
    assert ("retired", name(layout, 2)) in found
    assert ("chain", "weights/000003/manifest.json") in found


def test_a_writer_that_never_was_is_found(layout: RunLayout) -> None:
    edit(layout.weights_retirement(0), lambda body: body.update({"incarnation": 7}))
    assert kinds(audit_run(layout)) == [("missing", "incarnations/000007.json")]


# -- midway ---------------------------------------------------------------------------------------------------------


def test_a_retirement_that_was_killed_midway_is_sound(unretired: RunLayout) -> None:
    """Version 0 is retired with a file left; 1 and 2 cannot be rebuilt, and nothing needs them."""
    kept = {path: path.read_bytes() for path in unretired.weights.rglob("*") if path.is_file()}
    retire(unretired)
    for path, data in kept.items():
        path.write_bytes(data)
    for version in (1, 2):
        unretired.weights_retirement(version).unlink()
    verdict = audit_run(unretired)
    assert verdict.ok
    assert [(note.kind, note.path.split("/")[1]) for note in verdict.notes] == [("leftover", "000000")]
    for path in unretired.weights_version(0).glob("*.safetensors"):
        path.unlink()
    verdict = audit_run(unretired)
    assert (verdict.violations, verdict.notes) == ((), ())


@pytest.mark.parametrize("at", range(5))
def test_a_run_may_retire_while_it_is_audited(unretired: RunLayout, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    prove: Callable[[Chain, WeightsManifest], bool] = Chain.prove

    def prove_while_it_retires(chain: Chain, manifest: WeightsManifest) -> bool:
        if manifest.version == at:
            retire(unretired)
        return prove(chain, manifest)

    monkeypatch.setattr(Chain, "prove", prove_while_it_retires)
    assert audit_run(unretired).violations == ()
    assert unretired.weights_retirement(2).exists()


def test_after_a_loss_of_all_that_was_kept_a_replay_is_awaited(layout: RunLayout) -> None:
    """Batch records stay, so what was retired can be compared and what was lost is published again."""
    for keyframe in layout.weights.glob("00000[36]/keyframe.*"):
        flip(keyframe, 100)
    assert not audit_run(layout).ok
    taken = take_over(layout, Claimant(), {})
    assert taken.record.seal.last_version == 2
    verdict = audit_run(layout)
    assert verdict.ok
    assert ("awaits-replay", name(layout, 2)) in [(note.kind, note.path) for note in verdict.notes]


def test_a_repair_moves_a_damaged_retirement_and_the_next_one_replaces_it(layout: RunLayout) -> None:
    flip(layout.weights_retirement(1), 30)
    _, findings = examine(layout)
    done = repair(layout, findings)
    assert [path for path, _ in done.moved] == [name(layout, 1)]
    assert not audit_run(layout).ok, "the payload is missing, and nothing says why"
    retire(layout, past_incarnation(layout))
    assert audit_run(layout).ok


def test_what_a_repair_says_of_a_run_with_retired_versions(layout: RunLayout) -> None:
    shutil.rmtree(layout.checkpoint(STEPS))
    _, findings = examine(layout)
    assert repair(layout, findings).next_start == ("will replay steps 7..8 from checkpoint 6",)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_kept_for_ever_must_be_there(unretired: RunLayout) -> None:
    past_incarnation(unretired)
    shutil.rmtree(unretired.checkpoint(6))
    assert audit_run(unretired).ok, "retention may have deleted it"
    path = unretired.incarnation(3)
    edit(path, lambda body: body.update({"recipe_changes": {"checkpoint.keep_every": 6}}))
    assert kinds(audit_run(unretired)) == [("missing", "checkpoints/000006/manifest.json")]
    edit(path, lambda body: body.update({"recipe_changes": {"checkpoint.keep_every": 4}}))
    assert audit_run(unretired).ok


def test_the_verdict_is_json(layout: RunLayout) -> None:
    assert json.loads(json.dumps(audit_run(layout).to_json()))["versions"] == {"first": 0, "last": 8, "verified": 6}


def test_a_keyframe_that_a_run_goes_on_to_publish_does_not_matter(layout: RunLayout) -> None:
    publish(layout, [9], past_incarnation(layout), keyframe_every=9)
    assert not [kind for kind, _ in kinds(audit_run(layout)) if kind == "retired"]


def test_a_version_that_was_needed_and_published_again_is_sound(layout: RunLayout) -> None:
    """Its new manifest is of an incarnation whose seal names it: the sealed one is in quarantine."""
    incarnation = past_incarnation(layout)
    replay = Publisher(layout, incarnation, keyframe_every=3, before_commit=unfenced)
    replay.distrust([1])
    for version in range(STEPS + 1):
        weight = torch.arange(256, dtype=torch.float32)
        weight[: version + 1] += version
        replay.publish(version, [("w", weight), ("b", torch.tensor([float(version)]))], {})
    verdict = audit_run(layout)
    assert verdict.violations == ()
    assert [note.path for note in verdict.notes if note.kind == "changed"] == [
        f"weights/00000{version}/manifest.json" for version in (1, 2)
    ]
    assert verdict.verified_versions == STEPS
