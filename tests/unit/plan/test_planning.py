"""What `milesbatch plan` says: sizes that are counted, refusals with their numbers, and the transport that pays."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import make_recipe
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.errors import InputError, ModelError
from milesbatch.models.made import make_model
from milesbatch.plan.gguf_header import read_header
from milesbatch.plan.measuring import measure
from milesbatch.plan.memory import trainer_device, trainer_host, worker_device
from milesbatch.plan.model_size import ModelSize, model_size
from milesbatch.plan.planning import make_plan
from milesbatch.plan.traffic import Measured, Speeds, Transport, bytes_per_step, choose_transport
from milesbatch.recipe.models import MadeModel, PretrainedModel
from milesbatch.recipe.site import Site
from milesbatch.store.layout import RunLayout
from milesbatch.weights.draft import copies
from milesbatch.weights.publisher import Publisher

LARGE = ModelSize(
    parameters=8_000_000_000, layer_parameters=218_000_000, layers=32, hidden=4096, intermediate=14336, heads=32,
    kv_heads=8, head_dim=128, vocabulary=128_256, context=8192, counted_from="test",
)  # fmt: skip


def recipe_of(**sections: Any) -> Any:
    return make_recipe(**{"weights": {"dtype": "bfloat16"}, **sections})


@pytest.mark.parametrize("layers", [1, 3])
def test_a_made_model_has_as_many_parameters_as_planned(layers: int) -> None:
    recipe = make_recipe(model={"kind": "made", "hidden_size": 48, "heads": 6, "kv_heads": 2, "layers": layers})
    assert isinstance(recipe.model, MadeModel)
    size, model = model_size(recipe), make_model(recipe.model, 0)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.layer_parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    assert size.outer_parameters == model.model.embed_tokens.weight.numel() + model.model.norm.weight.numel()


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_a_directory_is_counted_from_headers_or_estimated_from_its_configuration(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    if kind == "qwen3":
        config.head_dim = 8
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    recipe = make_recipe(model=PretrainedModel(path=str(tmp_path), max_length=32))
    size = model_size(recipe)
    assert (size.parameters, size.context) == (sum(p.numel() for p in model.parameters()), 32)
    assert size.layer_parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    assert size.counted_from == "safetensors headers"
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    guessed = model_size(recipe)
    assert (guessed.parameters, guessed.counted_from) == (size.parameters, "config.json")


def gguf(path: Path, tensors: dict[str, tuple[int, ...]]) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    numbers = {
        "embedding_length": 8, "block_count": 1, "attention.head_count": 2, "attention.head_count_kv": 1,
        "feed_forward_length": 16, "context_length": 128,
    }  # fmt: skip
    values = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    values += [text(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()]
    values += [text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")]
    values += [text("scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3)]
    rows = b"".join(
        text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", 0, 0)
        for name, shape in tensors.items()
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + rows)
    return path


def test_a_gguf_file_is_counted_from_its_header(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", {"token_embd.weight": (8, 50), "blk.0.ffn_up.weight": (8, 16), "norm": (8,)})
    assert read_header(path)[1] == {"token_embd.weight": 400, "blk.0.ffn_up.weight": 128, "norm": 8}
    recipe = make_recipe(model=PretrainedModel(path=str(tmp_path), gguf_file="m.gguf"))
    size = model_size(recipe)
    assert (size.parameters, size.layer_parameters, size.vocabulary, size.context) == (536, 128, 50, 128)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"m\.gguf"):
            model_size(recipe)


def test_models_that_cannot_be_sized_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing is downloaded"):
        model_size(make_recipe(model=PretrainedModel(path="s3://bucket/model")))
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ModelError, match="num_hidden_layers"):
        model_size(make_recipe(model=PretrainedModel(path=str(tmp_path))))


def test_memory_shrinks_with_ranks_and_grows_with_what_is_asked() -> None:
    parts = {ranks: trainer_device(recipe_of(trainer={"ranks": ranks}), LARGE) for ranks in (1, 8)}
    for name in ("weights", "gradients", "optimizer"):
        assert parts[1][name] == pytest.approx(8 * parts[8][name])
    assert sum(parts[1][name] for name in ("weights", "gradients", "optimizer")) == 16 * LARGE.parameters
    assert parts[8]["gathered"] > parts[1]["gathered"] == 0
    assert trainer_device(recipe_of(algorithm={"kl_coef": 0.1}), LARGE)["reference"] > 0
    less = trainer_device(recipe_of(trainer={"gradient_checkpointing": True}), LARGE)["activations"]
    assert less < trainer_device(recipe_of(), LARGE)["activations"]
    spread = trainer_host(recipe_of(trainer={"ranks": 8}), LARGE)["published weights"]
    assert 2 * 2 * LARGE.parameters / 8 <= spread < 2 * 2 * LARGE.parameters / 4
    sent = recipe_of(trainer={"ranks": 8}, weights={"dtype": "bfloat16", "transport": "broadcast"})
    assert trainer_host(sent, LARGE)["published weights"] == 2 * 2 * LARGE.parameters
    few, many = (recipe_of(rollout={"max_concurrent_samples": n}) for n in (8, 64))
    cache = "key-value cache"
    assert 8 * worker_device(few, LARGE)[cache] == worker_device(many, LARGE)[cache] == 2 * 2 * 32 * 8 * 128 * 64 * 8192


@pytest.mark.parametrize(
    ("diff_on", "gpus", "expected"), [("auto", 0, 0), ("auto", 1, 1), ("device", 0, 1), ("host", 1, 0)]
)
def test_changes_that_are_looked_for_on_the_device_take_its_memory(diff_on: str, gpus: int, expected: int) -> None:
    recipe = recipe_of(
        trainer={"ranks": 8},
        weights={"dtype": "bfloat16", "diff_on": diff_on},
        slurm={"trainer": {"gpus_per_task": gpus}},
    )
    on_host = trainer_host(recipe, LARGE)["published weights"]
    assert trainer_device(recipe, LARGE)["published weights"] == expected * (on_host + 128 * 2**20)


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    recipe = recipe_of(
        rollout={"sampling": {"max_new_tokens": 9000}, "workers": 2},
        slurm={"trainer": {"gpus_per_task": 1}, "rollout": {"memory_gib": 16}, "time_limit_minutes": 600},
    )
    site = Site(name="here", max_time_minutes=60, shapes=("single",))
    plan = make_plan(recipe, LARGE, site, gpu_gib=80)
    text = "\n".join(plan.problems)
    assert not plan.fits and len(plan.problems) == 5
    for number in ("80.00 GiB", "16.00 GiB", "optimizer", "9000", "8192", "600", "60", "het", "single"):
        assert number in text, number
    small = model_size(make_recipe())
    assert make_plan(make_recipe(), small, Site(name="here"), gpu_gib=80).fits
    assert make_plan(recipe_of(slurm={"trainer": {"gpus_per_task": 1}}), LARGE, None).fits, "no limit is known"


def choose(
    workers: int, fs: float | None, net: float | None, share: float | None = 0.004, step_s: float | None = None
) -> Transport:
    recipe = recipe_of(rollout={"workers": workers, "staleness": 1})
    measured = None if share is None else Measured("run", share, 0.01, step_s)
    return choose_transport(recipe, LARGE, measured, Speeds(fs, net), step_s)


def test_the_transport_follows_from_bytes_bandwidths_and_workers() -> None:
    assert choose(2, 1e9, 1e9).recommended == "delta", "16 GB against 2 times 64 MB"
    assert choose(512, 1e9, 25e9).recommended == "broadcast"
    assert choose(512, 100e9, 25e9).recommended == "delta"
    assert choose(512, 1e9, 25e9, step_s=10_000).recommended == "delta", "rollout may lag for hours"
    found = choose(512, 1e9, 25e9)
    assert found.delta_s == pytest.approx((512 * 0.064, 512 * 0.064))
    assert found.broadcast_s == pytest.approx(0.64)
    assert found.pays_above == pytest.approx(16e9 / (512 * 64e6))
    assert "512 workers" in found.reason and "32.8 s" in found.reason


@pytest.mark.parametrize(("fs", "net"), [(None, 1e9), (1e9, None), (None, None)])
def test_without_a_bandwidth_it_says_from_which_ratio_on_a_broadcast_pays(fs: float | None, net: float | None) -> None:
    found = choose(64, fs, net, share=None)
    assert found.recommended == "delta" and f"{found.pays_above:,.1f} times" in found.reason
    assert found.delta_bytes[0] < found.delta_bytes[1], "a range, where nothing was measured"


def published(layout: RunLayout, recipe: Any, versions: int) -> None:
    publisher = Publisher(layout, 1, keyframe_every=50, before_commit=lambda: None)
    model = make_model(recipe.model, 0)
    for version in range(versions):
        for parameter in model.parameters():
            parameter.data.view(-1)[version::50] *= 1.01
        publisher.publish_share(version, copies(model.named_parameters(), {"lm_head.weight": ""}), {})


def test_a_run_of_the_same_model_is_measured(tmp_path: Path) -> None:
    recipe, layout = make_recipe(weights={"dtype": "float32"}), RunLayout(tmp_path / "run")
    for directory in layout.directories():
        directory.mkdir(parents=True)
    with pytest.raises(InputError, match="no delta"):
        measure(layout, recipe, model_size(recipe))
    published(layout, recipe, 4)
    steps = [
        {"event": "train_step", "metrics": {"wait_s": 1, "train_s": s, "publish_s": 0.5}} for s in (99, 9, 9, 2, 4)
    ]
    layout.event_log("trainer-0", 1).write_text("".join(json.dumps(step) + "\n" for step in steps))
    found = measure(layout, recipe, model_size(recipe))
    assert found.step_s == pytest.approx(4.5)
    assert found.changed_share == pytest.approx(0.02, rel=0.2)
    sizes = [sum(p.stat().st_size for p in layout.weights_version(v).glob("delta.*")) for v in (1, 2, 3)]
    expected = sum(sizes) / 3
    size = model_size(recipe)
    plan = make_plan(recipe, size, None, found)
    assert plan.bytes_per_step["deltas written"] == pytest.approx(expected, abs=2)
    assert plan.bytes_per_step == bytes_per_step(recipe, size, plan.transport.delta_bytes)
    other = make_recipe(model={"kind": "made", "layers": 3})
    with pytest.raises(InputError, match="elements"):
        measure(layout, other, model_size(other))


def test_the_command_prints_words_or_one_document(tmp_path: Path) -> None:
    words = CliRunner().invoke(app, ["plan", "recipes/tiny.yaml"])
    assert words.exit_code == 0 and "400,640 parameters" in words.output and "fits" in words.output
    body = json.loads(CliRunner().invoke(app, ["plan", "recipes/tiny.yaml", "--json"]).stdout)
    for key in ("fits", "ranks", "layout", "memory_bytes_per_gpu", "bytes_per_step", "step_s", "lag", "problems"):
        assert key in body
    assert (body["step_s"], body["lag"], body["transport"]["recommended"]) == (None, 1, "delta")
    refused = CliRunner().invoke(
        app, ["plan", "recipes/tiny.yaml", "--set", "rollout.sampling.max_new_tokens=64", "--json"]
    )
    assert refused.exit_code == 1 and json.loads(refused.stdout)["fits"] is False


@pytest.mark.parametrize("option", ["--filesystem-gb-s", "--network-gb-s", "--gpu-memory-gib"])
def test_speeds_and_memory_that_mean_nothing_are_refused(option: str) -> None:
    def planned(value: str) -> Any:
        words = ["plan", "recipes/tiny.yaml", "--set", "slurm.rollout.gpus_per_task=1", option, value]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    for value in ("0", "-1", "1000001", "nan", "inf", "fast"):
        refused = planned(value)
        assert refused.exit_code == 2 and option in refused.output and refused.stdout == "", value
    for value in ("1e6", "0.5"):
        assert planned(value).exit_code == (1 if (option, value) == ("--gpu-memory-gib", "0.5") else 0), value


def test_memory_of_gpus_is_refused_where_there_are_none() -> None:
    asked = ["plan", "recipes/tiny.yaml", "--gpu-memory-gib", "80"]
    refused = CliRunner().invoke(app, asked)
    assert isinstance(refused.exception, InputError)
    assert "--gpu-memory-gib 80.0" in refused.exception.what and "gpus_per_task" in refused.exception.mend
    for role in ("trainer", "rollout"):
        assert CliRunner().invoke(app, [*asked, "--set", f"slurm.{role}.gpus_per_task=1"]).exit_code == 0


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom milesbatch.cli.main import app\n"
        "try:\n app(['plan', 'recipes/tiny.yaml'])\nexcept SystemExit as end:\n assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[3])
