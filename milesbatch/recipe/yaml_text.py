"""YAML text to plain values, with the line that each value came from.

Owns: the YAML that recipes are written in: YAML 1.1 as PyYAML reads it, but ``1e-4`` is a number, dates stay text,
and a key that appears twice is an error. Never: what the values mean. Invariant: everything returned is a JSON value.
The page behind it is https://yaml.org/spec/1.1/.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from milesbatch.errors import RecipeError
from milesbatch.recipe.fields import Path

_FLOAT_TAG = "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_MEND = "correct the YAML and give the same command again"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own protocol)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes what :class:`_Loader` would read as a number."""


_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789"))
_Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789"))


@dataclass(frozen=True, slots=True)
class Document:
    """Values of one source (a file or a ``--set``) and where each of them is written."""

    value: Any
    origins: dict[Path, str]


def parse_yaml(text: str, source: str, prefix: Path = (), *, lines: bool = True) -> Document:
    """Parse one YAML document; ``origins`` maps the path of each value, below ``prefix``, to its source and line.

    Raises:
        RecipeError: the text is not YAML, has a key twice, a key that is not text, or a value that JSON lacks.
    """
    place: Callable[[yaml.Node], str] = (
        (lambda n: f"{source}, line {n.start_mark.line + 1}") if lines else lambda _: source
    )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        origins: dict[Path, str] = {} if node is not None else {prefix: source}
        value = None if node is None else _Builder(loader, place, origins).build(node, prefix)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark and lines else source
        cause = ": ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{where}: not readable as YAML ({cause})", mend=_MEND) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not readable as YAML ({error})", mend=_MEND) from error
    except RecursionError:
        raise RecipeError(f"{source}: nested too deeply, or an alias refers to itself", mend=_MEND) from None
    return Document(value, origins)


def dump_yaml(value: Any) -> str:
    """YAML text that :func:`parse_yaml` reads back as an equal value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)


@dataclass(frozen=True, slots=True)
class _Builder:
    loader: _Loader
    place: Callable[[yaml.Node], str]
    origins: dict[Path, str]

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.origins[path] = self.place(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, str(i))) for i, item in enumerate(node.value)]
        try:
            value = self.loader.construct_object(node)
        except ValueError as error:
            raise RecipeError(f"{self.place(node)}: {node.value!r} is not readable ({error})", mend=_MEND) from error
        if not isinstance(value, str | int | float | None):
            raise RecipeError(f"{self.place(node)}: {node.value!r} has a YAML type that is not used here", mend=_MEND)
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        lines: dict[str, str] = {}
        for key, _ in node.value:
            if key.tag == _MERGE_TAG:
                continue
            name = self.loader.construct_object(key) if isinstance(key, yaml.ScalarNode) else None
            if not isinstance(name, str):
                text = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise RecipeError(f"{self.place(key)}: the key {text!r} is not text", mend="put it in quotes")
            if name in lines:
                dotted = ".".join((*path, name))
                raise RecipeError(
                    f"{self.place(key)}: the key `{dotted}` appears twice; the first is in {lines[name]}",
                    mend="keep one of the two",
                )
            lines[name] = self.place(key)
        self.loader.flatten_mapping(node)
        values = {}
        for key, item in node.value:
            name = str(self.loader.construct_object(key))
            values[name] = self.build(item, (*path, name))
            if name in lines:
                self.origins[*path, name] = lines[name]
        return values
