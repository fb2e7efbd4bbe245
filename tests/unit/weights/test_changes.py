"""``weights stats``: densities against a count by hand, kinds and layers by name, what stands out, and how long it takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from many_versions import write_versions
from typer.testing import CliRunner

from milesbatch.cli import weights as cli
from milesbatch.cli.weights_stats import sparks
from milesbatch.errors import InputError
from milesbatch.store.layout import RunLayout
from milesbatch.weights.changes import kind_of, layer_of, mark_in_words, read_changes
from milesbatch.weights.publisher import Publisher

NAMES = (
    ("model.embed_tokens.weight", "embed", None),
    ("lm_head.weight", "lm_head", None),
    ("model.norm.weight", "norm", None),
    ("model.layers.7.input_layernorm.weight", "norm", 7),
    ("model.layers.7.self_attn.q_norm.weight", "norm", 7),
    ("model.layers.31.self_attn.q_proj.weight", "q_proj", 31),
    ("model.layers.31.self_attn.k_proj.bias", "k_proj", 31),
    ("model.layers.31.self_attn.v_proj.weight_scale_inv", "v_proj", 31),
    ("model.layers.31.self_attn.o_proj.weight", "o_proj", 31),
    ("model.layers.2.self_attn.q_a_proj.weight", "q_proj", 2),
    ("model.layers.2.self_attn.kv_b_proj.weight", "kv_proj", 2),
    ("model.layers.0.mlp.gate_proj.weight", "mlp.gate_proj", 0),
    ("model.layers.0.mlp.up_proj.weight", "mlp.up_proj", 0),
    ("model.layers.0.mlp.down_proj.weight", "mlp.down_proj", 0),
    ("model.layers.3.mlp.gate.weight", "router", 3),
    ("model.layers.3.mlp.experts.12.down_proj.weight", "experts.down_proj", 3),
    ("model.layers.3.block_sparse_moe.experts.1.w1.weight", "experts.gate_proj", 3),
    ("model.layers.3.mlp.shared_experts.up_proj.weight", "mlp.up_proj", 3),
    ("transformer.h.11.attn.c_attn.weight", "qkv_proj", 11),
    ("transformer.h.11.attn.c_proj.weight", "o_proj", 11),
    ("transformer.h.11.mlp.c_proj.weight", "mlp.down_proj", 11),
    ("transformer.h.11.ln_1.weight", "norm", 11),
    ("transformer.wte.weight", "embed", None),
    ("anything.at.all", "other", None),
    ("model.layers.4.mamba.A_log", "other", 4),
    ("layers", "other", None),
)


@pytest.mark.parametrize(("name", "kind", "layer"), NAMES)
def test_kind_and_layer_are_in_the_name(name: str, kind: str, layer: int | None) -> None:
    assert (kind_of(name), layer_of(name)) == (kind, layer)


def make(version: int) -> dict[str, torch.Tensor]:
    """Version v changes v elements of layer 0 and 2 v of layer 1; version 3 nothing."""
    tensors = {
        "model.embed_tokens.weight": torch.zeros(1000, dtype=torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(100, 10),
        "model.layers.1.self_attn.q_proj.weight": torch.zeros(100, 10),
        "model.layers.1.empty": torch.zeros(0),
    }
    for step in range(1, version + 1):
        if step != 3:
            tensors["model.layers.0.self_attn.q_proj.weight"].view(-1)[:step] += 1
            tensors["model.layers.1.self_attn.q_proj.weight"].view(-1)[: 2 * step] += 1
    return tensors


def test_densities_are_those_counted_by_hand(layout: RunLayout) -> None:
    publisher = Publisher(layout, 1, keyframe_every=2, before_commit=lambda: None)
    for version in range(5):
        publisher.publish(version, make(version).items(), {})
    found = read_changes(layout)
    assert found.versions == [0, 1, 2, 3, 4] and found.gaps == []
    assert found.whole.density == [None, 3 / 3000, 6 / 3000, 0, 12 / 3000]
    kinds = {group.name: group for group in found.kinds}
    assert list(kinds) == ["embed", "q_proj", "other"]
    assert kinds["q_proj"].density == [None, 3 / 2000, 6 / 2000, 0, 12 / 2000]
    assert kinds["embed"].density == [None, 0, 0, 0, 0] and kinds["other"].density == [None] * 5
    assert [(group.name, group.tensors, group.elements) for group in found.layers] == [("0", 1, 1000), ("1", 2, 1000)]
    assert found.layers[1].density == [None, 0.002, 0.004, 0, 0.008]
    moments = found.layers[1].moments(found.versions)
    assert moments is not None
    assert (moments.first, moments.first_version, moments.last, moments.last_version) == (0.002, 1, 0.008, 4)
    assert (moments.max, moments.max_version, moments.mean) == (0.008, 4, pytest.approx(0.0035))
    assert kinds["other"].moments(found.versions) is None
    for version, (delta, full) in enumerate(zip(found.delta_bytes, found.keyframe_bytes, strict=True)):
        on_disk = {
            kind: sum(path.stat().st_size for path in layout.weights_version(version).glob(f"{kind}.*"))
            for kind in ("delta", "keyframe")
        }
        assert (delta or 0, full or 0) == (on_disk["delta"], on_disk["keyframe"]), version
    assert [one is None for one in found.delta_bytes] == [True, False, False, False, False]
    assert [one is None for one in found.keyframe_bytes] == [False, True, False, True, False]
    assert found.encodings[0] == {} and found.encodings[3] == {"same": 4}
    (mark,) = found.marks
    assert (mark.version, mark.kind, len(mark.tensors)) == (3, "empty", 3)
    assert "model.embed_tokens.weight" in mark_in_words(mark)


def densities(*values: int) -> Callable[[int, int], int]:
    """Changed elements of 10,000: of the tensor at place 1 in version v; all others always change 100."""
    return lambda version, place: values[version] if place == 1 else 100


@pytest.mark.parametrize(("odd", "kind"), [(4500, "dense"), (560, None), (100, None), (5, None)])
def test_a_density_far_off_is_marked_with_its_tensor(layout: RunLayout, odd: int, kind: str | None) -> None:
    changed = densities(*[100] * 30, odd, *[100] * 5)
    write_versions(layout, 36, layers=1, kinds=("self_attn.q_proj", "mlp.up_proj"), changed=changed)
    marks = read_changes(layout).marks
    assert [(mark.version, mark.kind) for mark in marks] == ([] if kind is None else [(30, kind)])
    for mark in marks:
        assert mark.tensors == ("model.layers.0.mlp.up_proj.weight",) and mark.others == 0
        assert mark.usual == 0.01
        assert mark_in_words(mark).startswith(
            "version 30 changed 23.000%, 23.0 times more than usual (1.000%): model.layers.0"
        )


def test_a_sparse_version_is_marked_and_few_versions_have_no_usual(layout: RunLayout) -> None:
    write_versions(
        layout, 12, layers=2, kinds=("q_proj",), changed=lambda version, place: 3 if version in (2, 9) else 500
    )
    (mark,) = read_changes(layout).marks
    assert (mark.version, mark.kind, mark.usual) == (9, "sparse", 0.05)
    assert set(mark.tensors) == {"model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight"}


def test_the_usual_is_that_of_the_last_twenty(layout: RunLayout) -> None:
    """A slow fall is no surprise, however far it goes."""
    write_versions(
        layout, 60, layers=1, kinds=("q_proj",), changed=lambda version, place: int(9000 * 0.93**version) + 1
    )
    assert read_changes(layout).marks == []


def test_a_damaged_manifest_costs_its_own_version(layout: RunLayout) -> None:
    write_versions(layout, 8, layers=1, kinds=("q_proj",), changed=lambda version, place: 10)
    for version, data in ((2, b"{"), (3, b"[]"), (4, b'{"tensors": [{}], "keyframe": null, "parent": 1}'), (5, b"")):
        layout.weights_manifest(version).write_bytes(data)
    found = read_changes(layout)
    assert found.versions == [0, 1, 6, 7] and len(found.gaps) == 4
    assert found.gaps[0].startswith("weights/000002/manifest.json cannot be read")


def test_other_tensors_on_the_way(layout: RunLayout) -> None:
    write_versions(layout, 3, layers=2, kinds=("q_proj",), changed=lambda version, place: 10)
    write_versions(layout, 6, layers=1, kinds=("v_proj",), changed=lambda version, place: 20, first=3)
    found = read_changes(layout)
    kinds = {group.name: group.density for group in found.kinds}
    assert kinds == {
        "q_proj": [None, 0.001, 0.001, None, None, None],
        "v_proj": [None, None, None, 0.002, 0.002, 0.002],
    }
    assert [len(group.density) for group in found.layers] == [6, 6] and found.marks == []


def test_a_thousand_versions_are_quick_and_payload_is_not_read(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    write_versions(layout, 1000, layers=24, kinds=kinds, changed=lambda version, place: 100 + place)
    before = Path.read_bytes

    def read(path: Path) -> bytes:
        assert path.name == "manifest.json", path
        return before(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    began_s = time.process_time()
    found = read_changes(layout)
    assert time.process_time() - began_s < 10  # about one on an idle machine
    assert len(found.versions) == 1000 and len(found.layers) == 24
    some = read_changes(layout, 50).versions
    assert len(some) == 50 and (some[0], some[-1]) == (0, 999)


def test_sparks() -> None:
    assert sparks([0, 1, None, 2]) == "▁▅ █"
    assert sparks([0.0, 0.0]) == "▁▁" and sparks([]) == "" and sparks([None]) == " "
    assert len(sparks([1.0] * 1000, 24)) == 24


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def test_the_command(layout: RunLayout) -> None:
    layout.run_record.write_text("{}")
    refused = invoke("stats", layout.root)
    assert isinstance(refused.exception, InputError) and "no policy versions yet" in refused.exception.what
    changed = densities(*[100] * 30, 4500)
    write_versions(layout, 31, layers=1, kinds=("self_attn.q_proj", "mlp.up_proj"), changed=changed)
    text = invoke("stats", layout.root)
    assert text.exit_code == 0, text.output
    assert "31 policy versions" in text.output and "30 deltas: 30 kB" in text.output
    assert "tensors of deltas by encoding: steps-zstd 100.0%" in text.output
    assert "mlp.up_proj" in text.output and "45%" in text.output and "█" in text.output
    assert max(len(line) for line in text.output.splitlines() if "█" in line) <= 80 and "…" not in text.output
    assert "version 30 changed 23.000%" in text.output
    body = json.loads(invoke("stats", layout.root, "--json").stdout)
    assert body["versions"][30] == {
        "version": 30,
        "density": 0.23,
        "delta_bytes": 1000,
        "keyframe_bytes": None,
        "tensors_by_encoding": {"steps-zstd": 2},
    }
    assert [group["name"] for group in body["kinds"]] == ["q_proj", "mlp.up_proj"]
    assert body["kinds"][1]["moments"]["max_version"] == 30 and len(body["layers"][0]["density"]) == 31
    assert body["marked"][0]["tensors"] == ["model.layers.0.mlp.up_proj.weight"] and body["unreadable"] == []
