"""What changed of the weights, on the page: which versions and layers, how large it is, and that names stay text."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from builders import make_run
from long_run import make_long_run
from many_versions import write_versions

from milesbatch.report.page.changes import changes_charts, changes_section
from milesbatch.report.page.document import page
from milesbatch.report.page.make import write_page
from milesbatch.report.page.material import gather
from milesbatch.store.layout import RunLayout
from milesbatch.weights.changes import Changes, read_changes

KINDS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm",
)  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


def heat(changes: Changes) -> dict[str, list[Any]]:
    (chart,) = (chart for chart in changes_charts(changes)[0] if chart["element"] == "chart-layers")
    parts: dict[str, list[Any]] = chart["parts"]
    return parts


def test_each_cell_is_a_layer_of_a_version(layout: RunLayout) -> None:
    write_versions(
        layout, 4, layers=2, kinds=KINDS[:1], changed=lambda version, place: (0, 100, 1)[version - 1] * (1 + place)
    )
    parts = heat(read_changes(layout))
    assert parts["start"] == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5] and parts["end"] == [1.5, 1.5, 2.5, 2.5, 3.5, 3.5]
    assert parts["row"] == ["0", "1"] * 3
    assert parts["level"][:2] == [0, 0] and parts["level"][3] == 1 and parts["level"][4] == 0.15
    assert parts["level"][4] < parts["level"][5] < parts["level"][2] < parts["level"][3]
    assert parts["text"][3] == "version 2, layer 1: 2 %"


def test_names_without_layers_are_shown_by_kind(layout: RunLayout) -> None:
    write_versions(layout, 3, layers=0, kinds=(), names=("a.q_proj.weight", "b"), changed=lambda version, place: 10)
    assert heat(read_changes(layout))["text"][:2] == ["version 1, q_proj: 0.1 %", "version 1, other: 0.1 %"]


def test_the_section_has_the_table_and_what_stands_out(layout: RunLayout) -> None:
    changed = lambda version, place: 4500 if (version, place) == (30, 1) else 100  # noqa: E731
    write_versions(layout, 40, layers=2, kinds=("self_attn.q_proj", "<b>x</b>"), changed=changed)
    document = page(gather(layout, "2026-03-02T00:00:00.000000Z", with_audit=False, tell_progress=lambda _: None), None)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", document))
    assert "What changed" in text and "40 versions between 0 and 39 looked at" in text
    assert "q_proj 2 20,000 1 % 1 % 1 % 1 %" in text
    assert "Versions that stand out" in text and "version 30 changed 12.000%, 12.0 times more than usual" in text
    assert "model.layers.0.&lt;b&gt;x&lt;/b&gt;.weight" in document and "<b>x</b>" not in document


def test_without_a_delta_there_is_nothing_to_show(layout: RunLayout) -> None:
    write_versions(layout, 1, layers=1, kinds=KINDS, changed=lambda version, place: 0)
    for changes in (read_changes(layout), Changes()):
        assert changes_section(changes) is None and changes_charts(changes) == ([], {})


def test_a_damaged_manifest_is_told_once(layout: RunLayout) -> None:
    write_versions(layout, 4, layers=1, kinds=KINDS, changed=lambda version, place: 7)
    layout.weights_manifest(2).write_bytes(b"{")
    gaps = gather(layout, "2026-03-02T00:00:00.000000Z", with_audit=False, tell_progress=lambda _: None).gaps
    assert len([gap for gap in gaps if "weights/000002/manifest.json" in gap]) == 1


def test_a_thousand_steps_with_their_weights_stay_below_five_megabytes(tmp_path: Path) -> None:
    layout = make_long_run(tmp_path / "long")
    write_versions(layout, 1001, layers=36, kinds=KINDS, changed=lambda version, place: 100 + (version * place) % 977)
    began_s = time.process_time()
    changes = read_changes(layout, 240)
    charts, columns = changes_charts(changes)
    assert time.process_time() - began_s < 8  # about one on an idle machine
    assert len(columns["version"]) == 240 and len(heat(changes)["text"]) <= 6000
    assert len(json.dumps([charts, columns])) < 700_000
    written = write_page(layout, tmp_path / "page.html", with_audit=False, tell_progress=lambda _: None)
    assert written.bytes < 5_000_000
