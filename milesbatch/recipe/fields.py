"""What the recipe models say about themselves, as text: types, limits, choices, and where a path leads.

Owns: the one wording of "what is allowed" that both errors and ``docs/recipe.md`` use. Never: values or files.
Invariant: every word comes from the pydantic models, so text and validation cannot differ.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]
Kinds = dict[str, type[BaseModel]]
"""Members of a section that comes in kinds, by the value of its ``kind``."""

_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value", type(None): "null"}
_PATTERNS = {
    r"^[^\n\r\x00]*$": "one line",
    r"""^[^\s'"\\#]+$""": "without blanks, quotes, backslashes and `#`",
    r"^--[a-z][a-z-]*(=[^\n\r\x00]*)?$": "`--option` or `--option=value`, one line",
}
"""Patterns that are told more clearly in words."""
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def kinds_of(annotation: Any) -> Kinds:
    """Models that a field may hold: by ``kind`` for a union of them, ``{"": model}`` for one, empty for a plain
    value."""
    if get_origin(annotation) is Annotated:
        return kinds_of(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"": annotation}
    members = [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
    kinds = {}
    for member in members:
        choices = get_args(member.model_fields["kind"].annotation) if "kind" in member.model_fields else ()
        kinds[choices[0] if choices else ""] = member
    return kinds


def type_text(annotation: Any) -> str:
    """A field's type in words: ``integer``, ``one of `a`, `b``` or ``list of numbers``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = ", ".join(limits_text(part) for part in arguments[1:] if isinstance(part, FieldInfo))
        return type_text(arguments[0]) + (f" ({limits})" if limits else "")
    if origin is Literal:
        choices = ", ".join(f"`{choice}`" for choice in arguments)
        return choices if len(arguments) == 1 else f"one of {choices}"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_plural(type_text(arguments[0]))}"
        return f"list of {len(arguments)} {_plural(type_text(arguments[0]))}"
    if origin in (list, set, frozenset):
        return f"list of {_plural(type_text(arguments[0]))}"
    if origin is dict:
        return f"mapping from {type_text(arguments[0])} to {type_text(arguments[1])}"
    kinds = kinds_of(annotation)
    if kinds:
        text = "section" if "" in kinds else f"section of one `kind`: {', '.join(f'`{kind}`' for kind in kinds)}"
        return text + (" or null" if type(None) in _members(annotation) else "")
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(member) for member in arguments)
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def limits_text(field: FieldInfo) -> str:
    """A field's limits in words, empty when it has none: ``at least 0, less than 1``."""
    words = []
    for limit in field.metadata:
        for attribute, word in _LIMITS.items():
            bound = getattr(limit, attribute, None)
            if bound is not None:
                words.append(f"{word} {bound}")
        for attribute, word in (("min_length", "at least"), ("max_length", "at most")):
            length = getattr(limit, attribute, None)
            if length is not None:
                words.append(f"length {word} {length}")
        if getattr(limit, "pattern", None) is not None:
            words.append(_PATTERNS.get(limit.pattern, f"must match `{limit.pattern}`"))
    return ", ".join(words)


def allowed_text(field: FieldInfo) -> str:
    """Type and limits of a field in one phrase."""
    return ", ".join(part for part in (type_text(field.annotation), limits_text(field)) if part)


def follow(
    root: type[BaseModel], location: Sequence[str | int]
) -> tuple[Path, type[BaseModel] | None, FieldInfo | None]:
    """Follow a pydantic error location: the dotted path without union tags, the innermost section, the field if
    known."""
    path: list[str] = []
    model: type[BaseModel] | None = root
    field: FieldInfo | None = None
    kinds: Kinds = {}
    for step in location:
        if len(kinds) > 1 and step in kinds:
            model, kinds, field = kinds[str(step)], {}, None
            continue
        path.append(str(step))
        if model is None or str(step) not in model.model_fields:
            # Inside a free mapping or list the last known field still says what is allowed.
            continue
        field = model.model_fields[str(step)]
        kinds = kinds_of(field.annotation)
        if len(kinds) == 1:
            model = next(iter(kinds.values()))
    return tuple(path), model, field


def all_paths(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """Paths of all fields below ``model`` in order, those of every kind included."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for member in kinds_of(field.annotation).values():
            yield from all_paths(member, (*prefix, name))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _plural(text: str) -> str:
    word, space, rest = text.partition(" ")
    return {"text": "texts", "integer": "integers", "number": "numbers"}.get(word, word) + space + rest
