import subprocess
import sys

import pytest
import torch
import yaml

from milesbatch.errors import ModelError
from milesbatch.models import load
from milesbatch.models.fingerprint import model_fingerprints
from milesbatch.models.prepare import prepare_model
from milesbatch.recipe.models import Recipe
from milesbatch.store.durable import digest_file

TINY = {"kind": "made", "hidden_size": 32, "layers": 1, "intermediate_size": 64, "max_length": 32}
WARM = {"steps": 12, "batch_size": 16, "examples": 64}


def recipe(seed: int = 0, **model: object) -> Recipe:
    section = {**TINY, "warm_start": WARM, **model}
    return Recipe.model_validate(
        {"name": "t", "seed": seed, "steps": 1, "model": section, "data": {"kind": "arithmetic", "max_operand": 9}}
    )


def digests(directory):
    return {path.name: digest_file(path) for path in directory.iterdir()}


def prepared(tmp_path, name, what, cache="cache"):
    lines = []
    prepare_model(what, tmp_path / name, tmp_path / cache, lines.append)
    return tmp_path / name, lines


def test_second_time_comes_from_the_cache_with_the_same_bytes(tmp_path):
    first, told = prepared(tmp_path, "a", recipe())
    second, silent = prepared(tmp_path, "b", recipe())
    assert any("warm start" in line for line in told)
    assert silent == []
    assert digests(first) == digests(second)
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    } <= set(digests(first))


def test_warm_start_is_deterministic_lowers_the_loss_and_depends_on_the_seed(tmp_path):
    first, told = prepared(tmp_path, "a", recipe(), cache="cache-a")
    torch.set_num_threads(2)
    second, _ = prepared(tmp_path, "b", recipe(), cache="cache-b")
    other, _ = prepared(tmp_path, "c", recipe(seed=1))
    assert torch.get_num_threads() == 2
    assert digests(first) == digests(second)
    assert digests(first)["model.safetensors"] != digests(other)["model.safetensors"]
    losses = [float(line.rsplit(" ", 1)[1]) for line in told if "loss" in line]
    assert losses[-1] < losses[0] - 0.3


def test_the_callers_random_state_is_untouched(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    prepared(tmp_path, "a", recipe())
    assert torch.equal(torch.rand(3), expected)


def test_a_damaged_cache_entry_is_found_and_built_again(tmp_path):
    first, _ = prepared(tmp_path, "a", recipe())
    (weights,) = (tmp_path / "cache" / "made").rglob("model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    second, told = prepared(tmp_path, "b", recipe())
    assert any("damaged" in line for line in told)
    assert digests(first) == digests(second)
    assert prepared(tmp_path, "c", recipe())[1] == []


def test_files_of_an_earlier_start_that_died_are_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    first, _ = prepared(tmp_path, "a", recipe())
    second, _ = prepared(tmp_path, "b", recipe())
    assert digests(first) == digests(second)


def test_initial_model_and_skeleton_have_the_same_names_and_are_tied(tmp_path):
    directory, _ = prepared(tmp_path, "a", recipe())
    model = load.load_initial_model(recipe(), directory)
    skeleton = load.load_skeleton(directory, torch.bfloat16)
    assert list(model.state_dict()) == list(skeleton.state_dict())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert skeleton.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    assert not model.training
    assert load.context_length(directory) == 32
    assert load.stop_token_ids(directory) == (2,)
    tokens = torch.tensor([[1, 5, 6, 7]])
    skeleton = load.load_skeleton(directory, torch.float32)
    skeleton.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, skeleton(tokens).logits)


def test_fingerprints_follow_the_content(tmp_path):
    first, _ = prepared(tmp_path, "a", recipe())
    again, _ = prepared(tmp_path, "b", recipe())
    other, _ = prepared(tmp_path, "c", recipe(seed=1))
    prints = model_fingerprints(recipe(), first)
    assert set(prints) == {"model", "tokenizer", "chat_template"}
    assert prints == model_fingerprints(recipe(), again)
    changed = model_fingerprints(recipe(seed=1), other)
    assert changed["model"] != prints["model"]
    assert changed["tokenizer"] == prints["tokenizer"]


def test_an_incomplete_model_directory_is_a_model_error(tmp_path):
    directory, _ = prepared(tmp_path, "a", recipe())
    (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0broken!!")
    with pytest.raises(ModelError, match="SafetensorError"):
        load.load_initial_model(recipe(), directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=str(directory)):
        load.load_skeleton(directory, torch.float32)


def test_as_a_process_it_says_what_is_wrong_and_exits_with_the_errors_code(tmp_path):
    what = {
        "name": "t",
        "steps": 1,
        "model": {"kind": "pretrained", "path": "/no/such/model"},
        "data": {"kind": "arithmetic"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(what))
    command = [
        sys.executable,
        "-m",
        "milesbatch.models.prepare",
        tmp_path / "recipe.yaml",
        tmp_path / "m",
        tmp_path / "c",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
