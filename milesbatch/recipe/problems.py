"""Turn pydantic's errors into sentences that the author of a recipe or a site can act on.

Owns: the wording. Never: the rules (the models have them). Invariant: each problem names the field, the value found,
what is allowed, and the file and line or the ``--set`` it came from where that is known.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from milesbatch.recipe.fields import Path, all_paths, allowed_text, follow, kinds_of

_LONGEST = 80


def problems_text(error: ValidationError, root: type[BaseModel], source: str, origins: dict[Path, str]) -> str:
    """Every problem that validating ``source`` as a ``root`` (the model of a recipe or a site) found, a line each."""
    problems = [_describe(detail, root, source, origins) for detail in error.errors(include_url=False)]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)])


def _describe(detail: ErrorDetails, root: type[BaseModel], source: str, origins: dict[Path, str]) -> str:
    path, model, field = follow(root, detail["loc"])
    kind = detail["type"]
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        kinds = ", ".join(f"`{name}`" for name in kinds_of(field.annotation)) if field else ""
        found = "missing" if kind == "union_tag_not_found" else f"found {_show(detail['ctx']['tag'])}"
        return f"{_head((*path, 'kind'), origins)}: {found}; allowed: one of {kinds}"
    if kind == "extra_forbidden":
        text = f"unknown key with value {_show(detail['input'])}; {_suggestion(root, path, model)}"
    elif kind == "missing":
        text = f"missing; expected {allowed_text(field)}" if field else "missing"
        text += f" ({field.description})" if field and field.description and len(detail["loc"]) == len(path) else ""
    elif kind == "value_error":
        text = detail["msg"].removeprefix("Value error, ")
        if path:
            text = f"found {_show(detail['input'])}; {text}"
    elif field is not None:
        text = f"found {_show(detail['input'])}; allowed: {allowed_text(field)}"
        text += _hint(detail)
    else:
        text = f"found {_show(detail['input'])}; {detail['msg']}"
    return f"{_head(path, origins) if path else source}: {text}"


def _hint(detail: ErrorDetails) -> str:
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        return " (put it in quotes to make it text)"
    if isinstance(detail["input"], str) and detail["type"] in ("int_type", "float_type", "bool_type"):
        return " (without quotes)"
    return ""


def _head(path: Path, origins: dict[Path, str]) -> str:
    # A section that exists only because of one field in it comes from where that field is written.
    below = [origin for place, origin in origins.items() if place[: len(path)] == path]
    if below and path not in origins:
        return f"{'.'.join(path)} ({below[0]})"
    for length in range(len(path), 0, -1):
        origin = origins.get(path[:length])
        if origin is not None:
            return f"{'.'.join(path)} ({origin})"
    return ".".join(path)


def _suggestion(root: type[BaseModel], path: Path, model: type[BaseModel] | None) -> str:
    if model is None:
        return "no key is allowed here"
    section, name = path[:-1], path[-1]
    names = list(model.model_fields)
    near = difflib.get_close_matches(name, names, n=3) or [known for known in names if known.startswith(f"{name}_")]
    elsewhere = [
        ".".join(p) for p in all_paths(root) if p[-1] == name or (len(path) == 1 and p == tuple(name.split(".")))
    ]
    if elsewhere:
        candidates = list(dict.fromkeys(elsewhere))[:3]
    elif near:
        candidates = [".".join((*section, match)) for match in near]
    else:
        return f"allowed here: {', '.join(names)}"
    return f"did you mean {' or '.join(f'`{candidate}`' for candidate in candidates)}?"


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
