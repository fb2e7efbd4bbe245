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
        ({"arguments": ["--port=5"]}, "--port, which the worker sets itself"),
        ({"pause": "stop"}, "retract"),
        ({"servers": 0}, "greater than or equal to 1"),
        ({"memory_fraction": 1.0}, "less than 1"),
    ],
)
def test_what_cannot_be(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        recipe(section)


def test_addresses_are_shared_out() -> None:
    assert recipe({"urls": ["http://a:1/", "http://b:2", "https://c"]}).rollout.sglang.urls == (
        "http://a:1",
        "http://b:2",
        "https://c",
    )


def test_the_environment_is_looked_for_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere/python cannot be run(.|\n)*make sglang-cpu"):
        check_servers_environment(recipe({"python": str(tmp_path / "nowhere" / "python")}))
    with pytest.raises(InputError, match=r"there is no SGLang beside (.|\n)*make sglang-cpu"):
        check_servers_environment(recipe({"python": sys.executable}))
    check_servers_environment(recipe({"python": "/nowhere", "urls": ["http://a:1", "http://b:1"]}))
    check_servers_environment(recipe({"python": "/nowhere"}, rollout={"engine": "embedded"}))
    check_servers_environment(recipe({"python": str(Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python")}))
