"""What was planned of bytes, against the files of a run that ended."""

from __future__ import annotations

import json
from pathlib import Path

from command import QUICK, milesbatch

from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import committed_versions, delta_refs, keyframe_refs, read_manifest

FACTOR = 1.5
"""Of what is estimated; headers and padding make small files larger than their tensors."""


def test_a_run_wrote_what_was_planned(unbroken: Path, cache: Path) -> None:
    planned = json.loads(milesbatch("plan", QUICK, "--json", cache=cache).out)
    layout = RunLayout(unbroken)
    manifests = [read_manifest(layout, version) for version in committed_versions(layout)]
    full, deltas = [], []
    for manifest in manifests:
        assert manifest is not None
        full += [sum(ref.bytes for ref in keyframe_refs(manifest))] * bool(keyframe_refs(manifest))
        deltas += [sum(ref.bytes for ref in delta_refs(manifest))] * (manifest.parent is not None)
    mean, (low, high) = sum(deltas) / len(deltas), planned["transport"]["delta_bytes"]
    assert low / FACTOR < mean < high * FACTOR
    assert planned["transport"]["broadcast_bytes"] <= max(full) < planned["transport"]["broadcast_bytes"] * FACTOR
    newest = max(layout.checkpoints.glob("*/manifest.json")).parent
    shards = sum(path.stat().st_size for path in newest.rglob("*.distcp"))
    assert 12 * planned["parameters"] <= shards < 12 * planned["parameters"] * FACTOR
    measured = json.loads(milesbatch("plan", QUICK, "--run", unbroken, "--json", cache=cache).out)
    assert measured["transport"]["delta_bytes"][0] == measured["transport"]["delta_bytes"][1]
    assert abs(measured["transport"]["delta_bytes"][0] - mean) <= 2
    assert measured["step_s"] > 0 and measured["measured_in"] == str(unbroken)
