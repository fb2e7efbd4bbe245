"""From a recipe file and ``--set`` to a resolved, frozen :class:`~milesbatch.recipe.models.Recipe`, and back to text.

Owns: loading, dumping and digesting. Never: the fields (``models.py``), torch, or the network. Invariant:
``load_recipe`` of a dumped recipe gives an equal recipe. The page behind it is ``docs/recipe.md``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from milesbatch.errors import RecipeError
from milesbatch.recipe.layers import apply_overrides, read_layers
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.problems import problems_text
from milesbatch.recipe.yaml_text import Document, dump_yaml
from milesbatch.records import canonical_json, digest_bytes


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe with what it ``extends``, then set ``overrides`` (``a.b=value``, the value being YAML).

    Raises:
        RecipeError: something is not allowed; lists every problem with field, value found, what is allowed, and origin.
    """
    return validate_document(apply_overrides(read_layers(Path(path)), overrides), str(path))


def validate_document(document: Document, source: str) -> Recipe:
    """Check a merged document against the models.

    Raises:
        RecipeError: see :func:`load_recipe`.
    """
    try:
        # Strict validation of JSON takes a list for a tuple, yet neither "3" nor true for an integer.
        return Recipe.model_validate_json(json.dumps(document.value), strict=True)
    except ValidationError as error:
        what = problems_text(error, Recipe, source, document.origins)
        raise RecipeError(what, mend="correct these fields; docs/recipe.md describes every one") from error
    except UnicodeEncodeError as error:
        raise RecipeError(f"{source}: holds text that is not Unicode ({error.reason})") from error


def dump_recipe(recipe: Recipe) -> str:
    """The one YAML text of a resolved recipe: every field, in the order of the models; free mappings sorted."""
    return dump_model(recipe)


def dump_model(model: BaseModel) -> str:
    """YAML text of a resolved recipe or site, which loads as an equal one."""
    return dump_yaml(_plain(model))


def recipe_digest(recipe: Recipe) -> str:
    """Digest over all resolved values; the same for every text that resolves to the same recipe."""
    return digest_bytes(canonical_json(recipe.model_dump(mode="json")))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
