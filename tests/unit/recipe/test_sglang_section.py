"""SGLang in a recipe: what goes together, and what is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from milesbatch.errors import InputError
from milesbatch.preparation import check_servers_environment
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.sglang import TESTED, python_of_servers


def recipe(section: dict[str, Any], **changes: Any) -> Recipe:
    rollout = {"engine": "sglang", "sglang": section, **changes.pop("rollout", {})}
    given = {
        "name": "x",
        "steps": 1,
        "determinism": "relaxed",
        "model": {"kind": "made"},
        "data": {"kind": "arithmetic"},
    }
    return Recipe.model_validate({**given, "rollout": rollout, **changes})


def test_bitwise_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"sglang cannot hold determinism: bitwise .* allowed: determinism: relaxed"
    ):
        recipe({}, determinism="bitwise")


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"urls": ["node7:30000"]}, "is not the address of a server"),
        ({"urls": ["http://node7:30000/v1", "http://b:1"]}, "is not the address of a server"),
        ({"urls": ["http://a:1", "http://a:1"]}, "there twice"),
        ({"urls": ["http://a:1"]}, "1 servers for 2 workers"),
        ({"routers": ["http://r:1", "http://r:2"]}, "in front of rollout.sglang.urls, and these are none"),
        ({"urls": ["http://a:1", "http://b:1"], "routers": ["http://r:1"]}, "1 routers for 2 workers"),
        ({"urls": ["http://a:1", "http://b:1"], "routers": ["r:1", "http://r:2"]}, "is not the address of a server"),
        ({"arguments": ["--port=5"]}, "'--port=5' sets --port: not in arguments, the worker sets it itself"),
        ({"arguments": ["--model=/x"]}, "--model=/x"),
        ({"arguments": ["--model_path=/x"]}, "--model-path"),
        ({"arguments": ["--hos=1.2.3.4"]}, "sets --host, of which it is the beginning"),
        ({"arguments": ["--port 3"]}, "'--port 3' sets --port"),
        ({"arguments": ["--config=/x"]}, "--config"),
        ({"arguments": ["--tp=2"]}, "set rollout.sglang.tensor_parallel"),
        ({"arguments": ["--tensor-par", "2"]}, "set rollout.sglang.tensor_parallel"),
        ({"arguments": ["--help"]}, "no server starts with it"),
        ({"arguments": ["-h"]}, "'-h' is no flag"),
        ({"arguments": ["foo"]}, "'foo' is no flag"),
        ({"arguments": ["--log-level=info", "foo"]}, "'foo' is no flag"),
        ({"arguments": [""]}, "'' is no flag"),
        ({"arguments": ["--"]}, "'--' is no flag"),
        ({"arguments": ["--log-level info"]}, "more than one word: write --log-level=value"),
        ({"pause": "stop"}, "retract"),
        ({"servers": 0}, "greater than or equal to 1"),
        ({"memory_fraction": 1.0}, "less than 1"),
        ({"servers": 65}, "less than or equal to 64"),
        ({"tensor_parallel": 65}, "less than or equal to 64"),
        ({"start_timeout_s": 1e300}, "less than or equal to 604800"),
        ({"update_timeout_s": 604801}, "less than or equal to 604800"),
        ({"memory_dir": ""}, "'' is no absolute path"),
        ({"memory_dir": "~/x"}, "is no absolute path; `~` and variables are not filled in"),
        ({"memory_dir": "/local/$USER"}, "has a variable in it"),
        ({"memory_dir": "/local/a\nb"}, "is no absolute path"),
        ({"key_file": "key"}, "is no absolute path"),
    ],
)
def test_what_cannot_be(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        recipe(section)


def test_free_flags_are_taken() -> None:
    words = ["--attention-backend=fa3", "--log-level", "info", "--schedule-conservativeness", "-1", "--enable-metrics"]
    assert recipe({"arguments": words}).rollout.sglang.arguments == tuple(words)


def test_addresses_are_shared_out() -> None:
    assert recipe({"urls": ["http://a:1/", "http://b:2", "https://c"]}).rollout.sglang.urls == (
        "http://a:1",
        "http://b:2",
        "https://c",
    )


def check(section: dict[str, Any], **changes: Any) -> list[str]:
    """What is reported."""
    told: list[str] = []
    check_servers_environment(recipe(section, **changes), told.append)
    return told


def test_the_environment_is_looked_for_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere/python cannot be run(.|\n)*make sglang-cpu"):
        check({"python": str(tmp_path / "nowhere" / "python")})
    with pytest.raises(InputError, match=r"there is no SGLang beside (.|\n)*make sglang-cpu"):
        check({"python": sys.executable})
    check({"python": "/nowhere", "urls": ["http://a:1", "http://b:1"]})
    check({"python": "/nowhere"}, rollout={"engine": "embedded"})
    assert check({"python": str(Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python")}) == []


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("answer", ["true", "echo hello", "echo 1"])
def test_what_answers_with_no_version_is_no_python(tmp_path: Path, answer: str) -> None:
    with pytest.raises(InputError, match=r"python is no Python: (.|\n)*make sglang-cpu"):
        check({"python": str(script(tmp_path / "python", answer))})


def test_another_version_than_the_tested_one_is_told(tmp_path: Path) -> None:
    (said,) = check({"python": str(script(tmp_path / "python", "echo 0.6.0.post1"))})
    assert "warning: SGLang 0.6.0.post1" in said and TESTED in said


def test_a_name_is_looked_for_where_the_shell_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what checks and by what starts alike."""
    found = script(tmp_path / "python-of-servers", f"echo {TESTED}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert check({"python": "python-of-servers"}) == []
    assert python_of_servers("python-of-servers") == found
    assert python_of_servers("bin/python") == Path.cwd() / "bin" / "python"
