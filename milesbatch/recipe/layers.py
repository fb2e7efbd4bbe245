"""Layers of a recipe or a site: files that extend one another, and ``--set`` on top.

Owns: reading them, merging them, and the memory of where each value came from. Never: whether a value is allowed (the
models say). Invariant: a later layer wins, key by key; only a section whose ``kind`` changes is replaced whole.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from milesbatch.errors import RecipeError
from milesbatch.recipe.fields import Path
from milesbatch.recipe.yaml_text import Document, parse_yaml

EXTENDS = "extends"
_SET = re.compile(r"^(?P<path>[A-Za-z_][\w-]*(\.[\w-]+)*)=(?P<value>.*)$", re.DOTALL)


_BEGIN = {"recipe": "begin with `name`, `steps`, `model` and `data`", "site": "begin with `name`"}


def read_layers(path: FilePath, noun: str = "recipe", chain: tuple[FilePath, ...] = ()) -> Document:
    """Read a file on top of what it ``extends``; the value is a mapping without that key.

    ``noun`` says what it is, for errors: ``recipe`` or ``site``.

    Raises:
        RecipeError: a file is missing, empty, not YAML, not a mapping, or extends itself.
    """
    resolved = path.resolve()
    if resolved in chain:
        cycle = " -> ".join(str(link) for link in (*chain[chain.index(resolved) :], resolved))
        raise RecipeError(f"{noun}s extend each other in a circle: {cycle}", mend="take one `extends` out")
    document = _read_mapping(path, noun)
    if EXTENDS not in document.value:
        return document
    origin, base = document.origins[EXTENDS,], document.value.pop(EXTENDS)
    if not isinstance(base, str) or not base:
        raise RecipeError(f"{origin}: `extends` is {base!r}; allowed: the path of one other {noun}, as text")
    base_path = path.parent / base
    if not base_path.exists():
        what = f"{origin}: `extends: {base}` names {base_path}, which does not exist{_nearest_file(base_path)}"
        raise RecipeError(what, mend="give the path relative to the file that extends")
    return merge(read_layers(base_path, noun, (*chain, resolved)), document)


def merge(base: Document, over: Document) -> Document:
    """Mapping ``over`` on top of mapping ``base``."""
    return Document(_merged(base.value, over.value), {**base.origins, **over.origins})


def apply_overrides(base: Document, overrides: Sequence[str]) -> Document:
    """Set dotted paths to YAML values (``a.b=c``); each replaces what was at its path.

    Raises:
        RecipeError: an override is not of the form ``a.b=c``, or its path leads through a plain value.
    """
    return assign(base, [_parse_override(text) for text in overrides])


def assign(base: Document, assignments: Sequence[tuple[Path, Document]]) -> Document:
    """Put values at paths, in order; a section whose ``kind`` is set to another one is emptied first.

    Raises:
        RecipeError: a path leads through a plain value.
    """
    values, origins = base.value, dict(base.origins)
    for path, document in assignments:
        # Before all others, so that the order of overrides does not matter.
        if path[-1] == "kind" and _at(values, path) not in (None, document.value):
            values = _assigned(values, path[:-1], {}, document.origins[path])
    for path, document in assignments:
        values = _assigned(values, path, document.value, document.origins[path])
        origins.update(document.origins)
    return Document(values, origins)


def _read_mapping(path: FilePath, noun: str) -> Document:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        what = f"there is no {noun} {path}{_nearest_file(path)}"
        raise RecipeError(what, mend="`milesbatch recipes ls` shows those that are shipped") from None
    except OSError as error:
        raise RecipeError(f"cannot read the {noun} {path}: {error.strerror}", mend="give the path of a file") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}, line {line}: not UTF-8 text ({error.reason})", mend="save it as UTF-8") from error
    document = parse_yaml(text, str(path))
    if document.value is None:
        raise RecipeError(f"the {noun} {path} is empty", mend=_BEGIN[noun])
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        raise RecipeError(f"the {noun} {path} is {kind}, not a mapping", mend="write `name: value` lines")
    return document


def _nearest_file(path: FilePath) -> str:
    if not path.parent.is_dir():
        return f" (the directory {path.parent} does not exist)"
    recipes = [file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    near = difflib.get_close_matches(path.name, recipes, n=3) or difflib.get_close_matches(f"{path.name}.yaml", recipes)
    return f"; near it: {', '.join(str(path.parent / name) for name in near)}" if near else ""


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _changes_kind(old, value):
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


def _changes_kind(base: Any, over: Any) -> bool:
    return "kind" in base and "kind" in over and bool(base["kind"] != over["kind"])


def _parse_override(text: str) -> tuple[Path, Document]:
    match = _SET.match(text)
    if match is None:
        raise RecipeError(f"--set {text}: not of the form a.b=value", mend="for example `--set trainer.ranks=4`")
    path = tuple(match["path"].split("."))
    return path, parse_yaml(match["value"], f"--set {text}", path, lines=False)


def _at(values: Any, path: Path) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _assigned(values: dict[str, Any], path: Path, value: Any, origin: str, done: Path = ()) -> dict[str, Any]:
    if not path:
        return dict(value)
    key, rest = path[0], path[1:]
    if not rest:
        return {**values, key: value}
    inner = values.get(key)
    if inner is not None and not isinstance(inner, dict):
        dotted = ".".join((*done, key))
        raise RecipeError(f"{origin}: `{dotted}` is {inner!r}, not a section", mend=f"set `{dotted}` itself")
    return {**values, key: _assigned(inner or {}, rest, value, origin, (*done, key))}
