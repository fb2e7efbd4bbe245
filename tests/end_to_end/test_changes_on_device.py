"""Changes of weights that are looked for where they are trained: the run's files are those of one that looks on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import QUICK, events, milesbatch

from milesbatch.records import WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import read_manifest

STEPS, FIRST_STEPS = 4, 2
FEW_CHANGES = ("--set", "weights.dtype=bfloat16", "--set", "trainer.optimizer.learning_rate=5e-7")
ONE_WORKER = ("--set", "rollout.workers=1")
"""At this rate about one element in fifty changes."""


def manifests(run: Path) -> list[WeightsManifest]:
    found = [read_manifest(RunLayout(run), version) for version in range(STEPS + 1)]
    assert None not in found
    return [manifest for manifest in found if manifest is not None]


def crossed(run: Path) -> dict[int, float]:
    return {
        event["step"]: event["metrics"]["weights_crossed_bytes"] for event in events(run, "trainer-0", "train_step")
    }


@pytest.mark.long
def test_two_lives_write_what_one_on_the_host_writes(cache: Path, tmp_path: Path) -> None:
    on_host, on_device = tmp_path / "host", tmp_path / "device"
    for run, way, steps in ((on_host, "host", STEPS), (on_device, "device", FIRST_STEPS), (on_device, "device", STEPS)):
        settings = (f"weights.diff_on={way}", f"steps={steps}", f"checkpoint.every={FIRST_STEPS}")
        changes = [word for setting in settings for word in ("--set", setting)]
        ended = milesbatch("run", QUICK, "--run-dir", run, *FEW_CHANGES, *ONE_WORKER, *changes, cache=cache)
        assert ended.code == 0, ended.err
    for found, expected in zip(manifests(on_device), manifests(on_host), strict=True):
        version = expected.version
        assert found.weights_digest == expected.weights_digest, version
        assert [(ref.bytes, ref.digest) for ref in found.files] == [(ref.bytes, ref.digest) for ref in expected.files]
        assert (found.parent, found.artefact) == (expected.parent, expected.artefact), version
        assert version == 0 or sum(entry.changed for entry in found.tensors) > 0
    whole, part = crossed(on_host), crossed(on_device)
    assert set(whole) == set(part) == set(range(1, STEPS + 1))
    assert all(part[step] < whole[step] / 2 for step in whole), (part, whole)
    assert milesbatch("audit", on_device, cache=cache).code == 0
