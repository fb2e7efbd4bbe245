"""The key of running servers comes from a file, and never from the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.engines.sglang.key import check_key, key_of
from milesbatch.errors import InputError
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.sglang import SGLang

Wrong = Callable[[Path], None]


def holding(content: bytes) -> Wrong:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def nothing(path: Path) -> None:
    """No file at all."""


WRONG = [
    *(holding(content) for content in (b"", b"two words", b"\xff\xfe", b"one\ntwo", "schlüssel".encode())),
    Path.mkdir,
]
SAID = r"rollout.sglang.key_file: .*key (cannot be read|does not hold a key)(.|\n)*what to do: name a file"


def test_the_file_holds_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    assert key_of(SGLang(key_file=str(tmp_path / "key"))) == "s3cret"
    assert key_of(SGLang()) == ""


@pytest.mark.parametrize("make", [nothing, *WRONG])
def test_what_holds_no_key_is_refused(tmp_path: Path, make: Wrong) -> None:
    make(tmp_path / "key")
    with pytest.raises(InputError, match=SAID):
        key_of(SGLang(key_file=str(tmp_path / "key")))


def test_a_key_that_is_wrong_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes("s3cret\xff".encode("latin-1"))
    with pytest.raises(InputError) as caught:
        key_of(SGLang(key_file=str(tmp_path / "key")))
    assert "s3cret" not in str(caught.value)


def recipe_file(place: Path, **section: Any) -> Path:
    """A run with two attached servers that want the key in ``place / "key"``."""
    given = {"urls": ["http://127.0.0.1:9"], "key_file": str(place / "key"), **section}
    path = place / "recipe.yaml"
    path.write_text(
        "name: attached\nsteps: 1\ndeterminism: relaxed\nmodel: {kind: made}\ndata: {kind: arithmetic}\n"
        f"rollout: {{engine: sglang, workers: 1, sglang: {json.dumps(given)}}}\n"
    )
    return path


@pytest.mark.parametrize("make", [nothing, *WRONG])
def test_a_run_is_not_begun_with_a_key_that_cannot_be_used(tmp_path: Path, make: Wrong) -> None:
    make(tmp_path / "key")
    words = ["run", str(recipe_file(tmp_path)), "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InputError), result.output
    with pytest.raises(InputError, match=SAID):
        raise result.exception
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", WRONG)
def test_what_is_there_and_wrong_is_wrong_everywhere(tmp_path: Path, make: Wrong) -> None:
    make(tmp_path / "key")
    with pytest.raises(InputError, match=SAID):
        check_key(load_recipe(recipe_file(tmp_path)), may_be_elsewhere=True)


def test_what_is_not_here_may_be_on_the_nodes(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path))
    check_key(recipe, may_be_elsewhere=True)
    with pytest.raises(InputError, match="No such file"):
        check_key(recipe, may_be_elsewhere=False)


def test_a_key_that_nobody_wants_is_not_looked_at(tmp_path: Path) -> None:
    check_key(load_recipe(recipe_file(tmp_path, urls=[])), may_be_elsewhere=False)
