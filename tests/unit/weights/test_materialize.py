"""Materialising: transformers loads the directory and finds the published bits; no torch is needed to write it."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from milesbatch.errors import InputError, ModelError, StorageError, StorageFullError
from milesbatch.store.layout import RunLayout
from milesbatch.weights import materialize as module
from milesbatch.weights.follower import Follower
from milesbatch.weights.materialize import materialize
from milesbatch.weights.publisher import Publisher

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def tiny_model(*, tied: bool) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    return Qwen3ForCausalLM(config)


def publish_model(layout: RunLayout, *, tied: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Versions 0 and 1 of a tiny model; the configuration names another dtype than the published one."""
    model = tiny_model(tied=tied)
    model.config.dtype = torch.float16
    model.config.save_pretrained(layout.model)
    (layout.model / "tokenizer.json").write_text('{"any": 1}')
    (layout.model / "model.safetensors").write_bytes(b"starting weights of the run")
    (layout.model / "templates").mkdir()
    (layout.model / "templates" / "tool.jinja").write_text("{{ messages }}")
    publisher = Publisher(layout, 1, keyframe_every=10, before_commit=lambda: None)
    state = {name: tensor.clone().to(dtype) for name, tensor in model.state_dict().items()}
    publisher.publish(0, state.items(), TIED if tied else {})
    state["model.embed_tokens.weight"][3] += 0.5
    state["model.norm.weight"][0] = -0.0
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    publisher.publish(1, state.items(), TIED if tied else {})
    return state


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_published_bits(
    layout: RunLayout, tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    state = publish_model(layout, tied=tied, dtype=dtype)
    manifest = materialize(layout, 1, tmp_path / "out")
    assert (manifest.version, manifest.artefact) == (1, "delta")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    loaded = model.state_dict()
    assert set(loaded) == set(state)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    for name, tensor in state.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name].contiguous().view(integer), tensor.contiguous().view(integer)), name
    if tied:
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_directory_holds_configuration_and_tokenizer_but_not_the_starting_weights(
    layout: RunLayout, tmp_path: Path
) -> None:
    publish_model(layout, tied=True, dtype=torch.float32)
    materialize(layout, 0, tmp_path / "a")
    Follower(layout).advance_to(0).write_model(tmp_path / "b")
    files = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert {"config.json", "tokenizer.json", "templates/tool.jinja", "model.safetensors"} <= files
    assert not any(".tmp-" in name for name in files)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "float32"
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_target_that_is_not_empty_is_refused_and_stays(layout: RunLayout, tmp_path: Path) -> None:
    publish_model(layout, tied=True, dtype=torch.float32)
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(InputError, match="not an empty directory"):
        materialize(layout, 1, target)
    with pytest.raises(InputError, match="not an empty directory"):
        Follower(layout).advance_to(1).write_model(target)
    with pytest.raises(InputError, match="not an empty directory"):
        materialize(layout, 1, target / "mine")
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_after_a_full_disk_nothing_is_left_and_the_same_call_goes_on(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_model(layout, tied=True, dtype=torch.float32)
    materialize(layout, 1, tmp_path / "whole")

    def full(stream: object, tensors: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a" / "b", tmp_path / "empty"):
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_tensors", full)
            with pytest.raises(StorageFullError, match="give the same command again"):
                materialize(layout, 1, target)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run", "whole"]
        assert list((tmp_path / "empty").iterdir()) == []
        materialize(layout, 1, target)
        assert files_of(target) == files_of(tmp_path / "whole")
        shutil.rmtree(target)
        (tmp_path / "a").rmdir() if target.parent.name == "a" else target.mkdir()


def test_killed_at_any_moment_the_same_call_goes_on(layout: RunLayout, tmp_path: Path) -> None:
    """Each state that a killed call leaves, with the unfinished file of one that is no more."""
    publish_model(layout, tied=True, dtype=torch.float32)
    materialize(layout, 1, tmp_path / "whole")
    whole = files_of(tmp_path / "whole")
    names = [name for name in whole if name != "model.safetensors"]
    child = subprocess.Popen(["true"])
    child.wait()
    for number in range(len(names) + 1):
        target = tmp_path / f"out-{number}"
        for name in names[:number]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(whole[name])
        target.mkdir(exist_ok=True)
        (target / f".tmp-{child.pid}-0123456789ab").write_bytes(b"half")
        materialize(layout, 1, target)
        assert files_of(target) == whole


def test_what_only_looks_like_an_unfinished_result_is_refused_and_stays(layout: RunLayout, tmp_path: Path) -> None:
    publish_model(layout, tied=True, dtype=torch.float32)
    others = {"config.json": b'{"mine": 1}', "tokenizer.json": b"{}", ".tmp-thesis": b"x", "templates/mine": b"x"}
    for number, (name, data) in enumerate(others.items()):
        target = tmp_path / f"out-{number}"
        (target / name).parent.mkdir(parents=True)
        (target / name).write_bytes(data)
        with pytest.raises(InputError, match=f"not an empty directory: it holds {name}"):
            materialize(layout, 1, target)
        assert files_of(target) == {name: data}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "templates").symlink_to(tmp_path / "out-3" / "templates")
    with pytest.raises(InputError, match="it holds templates"):
        materialize(layout, 1, tmp_path / "linked")


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_is_missing_is_named_before_anything_is_written(layout: RunLayout, tmp_path: Path) -> None:
    publish_model(layout, tied=True, dtype=torch.float32)
    with pytest.raises(StorageError, match="policy version 9 is not published"):
        materialize(layout, 9, tmp_path / "out")
    for content, expected in ((b"[1]", "not a JSON object"), (b"{", "cannot be read"), (None, "is missing")):
        (layout.model / "config.json").unlink()
        if content is not None:
            (layout.model / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=expected):
            materialize(layout, 1, tmp_path / "out")
        (layout.model / "config.json").touch()
    assert not (tmp_path / "out").exists()


def test_reading_needs_neither_torch_nor_safetensors(
    layout: RunLayout, tmp_path: Path, chain: Publisher, version_tensors: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    (layout.model / "config.json").write_text("{}")
    script = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        "from pathlib import Path\n"
        "from milesbatch.store.layout import RunLayout\n"
        "from milesbatch.weights.follower import Follower\n"
        "from milesbatch.weights.listing import rows, verify\n"
        "from milesbatch.weights.materialize import materialize\n"
        "layout = RunLayout(Path(sys.argv[1]))\n"
        "materialize(layout, 5, Path(sys.argv[2]))\n"
        "print(len(rows(layout)), list(verify(layout)), Follower(layout).advance_to(6).version)\n"
    )
    command = [sys.executable, "-c", script, str(layout.root), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "7 [] 6\n"), result.stderr
    from safetensors.torch import load_file

    loaded, expected = load_file(tmp_path / "out" / "model.safetensors"), version_tensors(5)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
