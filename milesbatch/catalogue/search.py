"""Finding runs: words and conditions. Pure.

A term is a word (looked for, without regard to case, in name, path, state, cause and recipe values) or a condition
``FIELD OP VALUE`` without spaces: ``state=failed``, ``reward_last>0.8``, ``recipe.seed=3``, ``cause~nccl``. All must hold.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from milesbatch.catalogue.entry import Entry
from milesbatch.errors import UsageError

Match = Callable[[Entry], bool]
_CONDITION = re.compile(r"([a-z_][A-Za-z0-9_.]*)(<=|>=|!=|=|<|>|~)(.*)", re.DOTALL)
_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_FIELDS = sorted({field.name for field in fields(Entry)} - {"recipe", "starts", "diagnosis_s"} | {"recovered"})


def find(entries: Sequence[Entry], terms: Sequence[str]) -> list[Entry]:
    """Those that all ``terms`` hold for, in their order.

    Raises:
        UsageError: a condition names a field that there is not, or compares what is not a number.
    """
    matches = [_match(term, entries) for term in terms]
    return [entry for entry in entries if all(match(entry) for match in matches)]


def _match(term: str, entries: Sequence[Entry]) -> Match:
    condition = _CONDITION.fullmatch(term)
    if condition is None:
        return lambda entry: term.lower() in _text(entry)
    name, sign, wanted = condition.groups()
    _check_field(name, entries)
    if sign == "~":
        return lambda entry: wanted.lower() in str(value_of(entry, name)).lower()
    if sign in _NUMBERS:
        limit, compare = _number(term, wanted), _NUMBERS[sign]
        return lambda entry: isinstance(value := value_of(entry, name), int | float) and compare(value, limit)
    return lambda entry: _equals(value_of(entry, name), wanted) is (sign == "=")


def value_of(entry: Entry, name: str) -> Any:
    """A field of the entry, or ``recipe.PATH``; None when its recipe has no such path."""
    return entry.recipe.get(name.removeprefix("recipe.")) if name.startswith("recipe.") else getattr(entry, name)


def _check_field(name: str, entries: Sequence[Entry]) -> None:
    paths = {f"recipe.{path}" for entry in entries for path in entry.recipe}
    if name in _FIELDS or name in paths or (name.startswith("recipe.") and not entries):
        return
    near = difflib.get_close_matches(name, [*_FIELDS, *sorted(paths)], n=3) or _FIELDS
    raise UsageError(f"there is no field {name}", mend=f"fields are {', '.join(near)}; recipe fields are recipe.PATH")


def _number(term: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{term}: {text!r} is not a number", mend="compare with a number, or use = or ~") from error


def _equals(value: Any, wanted: str) -> bool:
    if isinstance(value, bool) or value is None:
        return {"true": True, "false": False, "null": None, "none": None}.get(wanted.lower(), ...) is value
    if isinstance(value, int | float):
        try:
            return float(wanted) == value
        except ValueError:
            return False
    return str(value) == wanted


def _text(entry: Entry) -> str:
    said = (entry.name, entry.path, entry.state, entry.cause, entry.failed_process, entry.failed_host)
    return "\n".join(str(part) for part in (*said, *entry.recipe.values()) if part is not None).lower()
