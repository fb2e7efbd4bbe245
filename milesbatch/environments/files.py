"""Prompts from a JSONL, Parquet or Arrow file, local or at any fsspec URL.

Owns reading and checking of prompt files. Never writes, never skips a broken row silently. Invariant: group ``g`` is row
``order[g % N]`` of epoch ``g // N``, where the order is a seeded permutation of that epoch; every row comes once an epoch.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping
from typing import Any

import fsspec
import pyarrow as pa

from milesbatch.environments.prompts import Message, Prompt, Purpose, stream_random
from milesbatch.errors import DataError
from milesbatch.recipe.models import FileData
from milesbatch.recipe.packages import PREFIX, package_path
from milesbatch.records import canonical_json, digest_bytes

_SHOWN = 5
"""How many broken rows an error lists."""
_ROLES = ("system", "user", "assistant", "tool")


class FileStream:
    """The rows of one prompt file, shuffled anew in each epoch."""

    def __init__(self, data: FileData, seed: int, purpose: Purpose = "train") -> None:
        """Read and check the whole file.

        Raises:
            DataError: missing, empty, of an unknown format, or with broken rows; names file and lines.
        """
        content = _read_bytes(data.path)
        self._data = data
        self._seed = seed
        self._purpose = purpose
        self._content_digest = digest_bytes(content)
        self._prompts = _parse_prompts(data, content)
        self._order = functools.lru_cache(maxsize=4)(self._permutation)

    def prompt(self, group_id: int) -> Prompt:
        """The row of a group; ``env`` holds the row's other columns."""
        epoch, position = divmod(group_id, len(self._prompts))
        return self._prompts[self._order(epoch)[position]]

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def fingerprint(self) -> str:
        """Digest of the file's bytes and of which columns are used; the path may change."""
        section = self._data.model_dump(mode="json", exclude={"path"})
        return digest_bytes(canonical_json({"content": self._content_digest, "data": section}))

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        stream_random(self._seed, "file", self._purpose, epoch).shuffle(order)
        return order


def _read_bytes(path: str) -> bytes:
    try:
        with fsspec.open(_located(path), "rb") as stream:
            content = stream.read()
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"cannot read the prompt file {path} ({error})", mend="check data.path; it is a local path or an fsspec URL"
        ) from error
    if not isinstance(content, bytes) or not content:
        raise DataError(f"the prompt file {path} is empty", mend="give a file with at least one prompt")
    return content


def _located(path: str) -> str:
    """``path``, with one inside a package found."""
    if not path.startswith(PREFIX):
        return path
    try:
        return str(package_path(path))
    except LookupError as error:
        what = f"cannot read the prompt file {path}: there is no installed package {error.args[0]!r}"
        raise DataError(what, mend="install it, or give another path") from error


def _parse_prompts(data: FileData, content: bytes) -> list[Prompt]:
    rows = _parse_rows(data.path, content)
    prompts: list[Prompt] = []
    broken: list[str] = []
    for line, row in rows:
        try:
            prompts.append(_prompt_of_row(data, line, row if not isinstance(row, ValueError) else _reraise(row)))
        except ValueError as error:
            broken.append(f"{data.path}, line {line}: {error}")
    if broken:
        more = f"\n  and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        listed = "\n  ".join(broken[:_SHOWN])
        raise DataError(
            f"the prompt file has {len(broken)} broken rows of {len(rows)}:\n  {listed}{more}",
            mend="mend or remove these rows; data.prompt_field, data.answer_field and data.id_field name the columns",
        )
    if not prompts:
        raise DataError(f"the prompt file {data.path} holds no row", mend="give a file with at least one prompt")
    return prompts


def _reraise(error: ValueError) -> Mapping[str, Any]:
    raise error


def _parse_rows(path: str, content: bytes) -> list[tuple[int, Mapping[str, Any] | ValueError]]:
    """(line or row number from 1, row or what is wrong with it) for each row."""
    if path.endswith((".jsonl", ".ndjson")):
        return [(n, _parse_line(line)) for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    if path.endswith((".parquet", ".arrow")):
        return list(enumerate(_read_table(path, content).to_pylist(), start=1))
    raise DataError(f"the prompt file {path} has an ending that is not known", mend="use .jsonl, .parquet or .arrow")


def _parse_line(line: bytes) -> Mapping[str, Any] | ValueError:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 text (byte {error.start})")
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return ValueError("not JSON that can be read: nested too deeply")
    return row if isinstance(row, dict) else ValueError(f"a JSON object is needed, found {type(row).__name__}")


def _read_table(path: str, content: bytes) -> Any:
    import pyarrow.parquet as parquet

    try:
        if path.endswith(".parquet"):
            return parquet.read_table(io.BytesIO(content))
        if content.startswith(b"ARROW1"):
            return pa.ipc.open_file(pa.py_buffer(content)).read_all()
        return pa.ipc.open_stream(pa.py_buffer(content)).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"the prompt file {path} cannot be read as {path.rsplit('.', 1)[-1]} ({error})", mend="write the file again"
        ) from error


def _prompt_of_row(data: FileData, line: int, row: Mapping[str, Any]) -> Prompt:
    """The prompt in one row.

    Raises:
        ValueError: says what is wrong with the row.
    """
    wanted = [data.prompt_field, data.answer_field, *([data.id_field] if data.id_field else [])]
    for name in wanted:
        if name not in row:
            raise ValueError(f"no field {name!r}; fields: {', '.join(map(repr, row)) or 'none'}")
        if row[name] is None:
            raise ValueError(f"field {name!r} is null")
    return Prompt(
        prompt_id=_plain(row[data.id_field]) if data.id_field else f"row-{line}",
        messages=_messages(data.prompt_field, row[data.prompt_field]),
        answer=_plain(row[data.answer_field]),
        env={name: _json_value(value) for name, value in row.items() if name not in wanted},
    )


def _messages(name: str, value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"field {name!r} is an empty string")
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {name!r} must be a string or a list of chat messages, found {type(value).__name__}")
    for item in value:
        if not isinstance(item, dict) or item.get("role") not in _ROLES or not isinstance(item.get("content"), str):
            raise ValueError(
                f"field {name!r}: each chat message needs `role` (one of {', '.join(_ROLES)}) and `content` (a string)"
            )
    return tuple(Message(item["role"], item["content"]) for item in value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_json_value(value), ensure_ascii=False, sort_keys=True)


def _json_value(value: Any) -> Any:
    """``value`` as JSON; what JSON cannot hold (times, bytes) becomes its text."""
    return json.loads(json.dumps(value, default=str))
