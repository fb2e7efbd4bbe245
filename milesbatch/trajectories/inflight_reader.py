"""Read files of ``inflight/``, and find damage before anybody continues from them.

Owns: opening and proving one file, and counting what is saved. Never: moves or deletes one, and never says whether its samples
may be continued. Invariant: the bytes are digested before Arrow parses any of them. The page behind it is
``docs/format-inflight.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from milesbatch import FORMAT_VERSION
from milesbatch.errors import CorruptArtefactError, FormatVersionError
from milesbatch.records import digest_bytes
from milesbatch.store.durable import read_optional
from milesbatch.store.layout import TRAJECTORY_END, RunLayout, TrajectoryName
from milesbatch.store.unfinished import saved_blocks
from milesbatch.trajectories.inflight_schema import (
    KEY_KIND,
    KEY_UNFINISHED,
    KIND,
    BegunSample,
    InflightMetadata,
    from_table,
    schema_like,
)
from milesbatch.trajectories.schema import KEY_FORMAT
from milesbatch.trajectories.writer import content_tag

_MEND = "nothing: what it holds is generated from the start"


@dataclass(frozen=True, slots=True)
class InflightFile:
    """A file that was proven."""

    name: TrajectoryName
    metadata: InflightMetadata
    samples: tuple[BegunSample, ...]
    num_bytes: int


def read_inflight(path: Path) -> InflightFile:
    """The whole file at ``path``, proven by its name and checked row by row.

    Raises:
        CorruptArtefactError: missing, cut short (``unseen`` says so), changed, or not such a file.
        FormatVersionError: written by a newer major format version.
        StorageError: it cannot be read.
    """
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing", mend=_MEND, unseen=path)
    name = _prove(path, data)
    table = _parse(path, data)
    try:
        metadata = InflightMetadata.from_arrow(table.schema.metadata)
        found = InflightFile(name, metadata, tuple(from_table(table)), len(data))
        for sample in found.samples:
            sample.validate()
        keys = {(sample.group_id, sample.sample_index) for sample in found.samples}
        if len(keys) != len(found.samples) or not all(name.first_group <= g <= name.last_group for g, _ in keys):
            raise ValueError("it holds a sample twice, or of a group that its name does not say")
    except (KeyError, ValueError, OverflowError) as error:
        raise CorruptArtefactError(f"{path} holds what no writer commits: {error}", mend=_MEND) from error
    return found


def _prove(path: Path, data: bytes) -> TrajectoryName:
    name, digest = TrajectoryName.parse(path.name), digest_bytes(data)
    if content_tag(digest) != name.tag:
        unseen = None if data.endswith(TRAJECTORY_END) else path
        what = f"{path} is damaged: expected a digest that begins xxh128:{name.tag}, found {digest}"
        raise CorruptArtefactError(what, mend=_MEND, unseen=unseen)
    return name


def _parse(path: Path, data: bytes) -> Any:
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as source:
            _check_format(path, source.schema)
            table = source.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise CorruptArtefactError(f"{path} cannot be parsed as an Arrow file ({error})", mend=_MEND) from error
    return table


def _check_format(path: Path, schema: Any) -> None:
    metadata = schema.metadata or {}
    text = metadata.get(KEY_FORMAT, b"").decode(errors="replace")
    major = text.partition(".")[0]
    if metadata.get(KEY_KIND) != KIND or not (major.isascii() and major.isdigit()):
        raise CorruptArtefactError(f"{path} is not a file of unfinished episodes (format {text!r})", mend=_MEND)
    if int(major) > FORMAT_VERSION[0]:
        raise FormatVersionError(
            f"{path}: format {text} is newer than the {FORMAT_VERSION[0]} that this version reads",
            mend="continue this run with a newer milesbatch",
        )
    if not schema.remove_metadata().equals(schema_like(schema)):
        raise CorruptArtefactError(f"{path} has other columns than a file of unfinished episodes", mend=_MEND)


def unfinished_episodes(layout: RunLayout) -> int:
    """How many unfinished episodes are saved, as the files say; a block that is there twice counts once. For people: files are
    opened, not proven, and one that cannot be opened counts 0.

    Raises:
        StorageError: the directory cannot be listed.
    """
    newest = {(name.first_group, name.last_group): name for name in reversed(saved_blocks(layout))}
    return sum(_stated(layout.unfinished(name)) for name in newest.values())


def _stated(path: Path) -> int:
    try:
        with pa.OSFile(str(path)) as stream, pa.ipc.open_file(stream) as source:
            return int((source.schema.metadata or {}).get(KEY_UNFINISHED, b"0"))
    except (pa.ArrowException, OSError, ValueError):
        return 0
