"""Building HTML that cannot be broken by what is put into it. Pure.

Owns: escaping. Invariant: text becomes markup only through :class:`Html`, and only this module makes :class:`Html` out of
strings; a trajectory that holds ``</script>`` or ``" onclick=`` stays the text that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_VOID = frozenset({"br", "hr", "input", "link", "meta"})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Markup that is already escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """Text as markup: escaped; control characters, overrides of direction and lone surrogates become visible."""
    if isinstance(value, Html):
        return value
    return Html(escape(_CONTROL.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. In names of attributes a leading underscore is dropped, others become hyphens; None leaves one out, True has
    no value."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.removeprefix("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{text(value)}"')
    begin = f"<{' '.join(words)}>"
    return Html(begin) if name in _VOID else Html(f"{begin}{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Html:
    """One after the other; None is left out."""
    return Html("".join(text(child) for child in children if child is not None))


def table(
    headings: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    label: str,
    numbers: Sequence[int] = (),
    identify: Mapping[int, str] | None = None,
    is_stacked: bool = False,
) -> Html:
    """A table that scrolls by itself when it is wider than the page; columns ``numbers`` are set right.

    ``identify`` maps rows to element ids; ``is_stacked``: on a narrow screen each row is a block, with its headings beside.
    """
    head = [tag("th", heading, scope="col", _class="n" if c in numbers else None) for c, heading in enumerate(headings)]
    body = []
    for place, row in enumerate(rows):
        cells = [
            tag("td", cell, _class="n" if c in numbers else None, data_label=headings[c] if is_stacked else None)
            for c, cell in enumerate(row)
        ]
        body.append(tag("tr", *cells, id=(identify or {}).get(place)))
    made = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag(
        "div", made, _class="scroll stacked" if is_stacked else "scroll", tabindex="0", role="region", aria_label=label
    )


def safe_json(value: Any) -> Html:
    """JSON to stand inside a script element: nothing in it can end the element or begin a comment."""
    data = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def raw(markup: str) -> Html:
    """Markup of this package's own (styles and scripts), as it is."""
    return Html(markup)
