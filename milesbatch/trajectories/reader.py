"""Read trajectory files, and find damage before anybody uses them.

Owns: finding, opening and checking committed files. Never: moves or deletes a damaged file (the caller quarantines),
and never says which file of a group counts (batch records and seals do). Invariant: with ``verify`` the bytes are
digested before Arrow parses any of them. The page behind it is ``docs/format-trajectories.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milesbatch import FORMAT_VERSION
from milesbatch.errors import CorruptArtefactError, FormatVersionError
from milesbatch.records import digest_bytes
from milesbatch.store.durable import read_optional, storage_error
from milesbatch.store.layout import TRAJECTORY_END, RunLayout, TrajectoryName
from milesbatch.trajectories.schema import KEY_FORMAT, FileMetadata, expert_bytes_of, from_table, trajectory_schema
from milesbatch.trajectories.trajectory import Trajectory
from milesbatch.trajectories.writer import content_tag

_MEND = "run `milesbatch audit` on the run; this file must not be used, its groups can be generated again"


def iterate_files(layout: RunLayout) -> Iterator[Path]:
    """Committed trajectory files of a run in the order of their first group; temporary and foreign names are left out.

    Raises:
        StorageError: the directory cannot be listed. A directory that does not exist has no files.
    """
    try:
        names = [path.name for path in layout.trajectories.iterdir()] if layout.trajectories.exists() else []
    except OSError as error:
        raise storage_error(layout.trajectories, error) from error
    parsed = [name for text in names if (name := _parse_name(text)) is not None]
    for name in sorted(parsed, key=lambda n: (n.first_group, n.last_group, n.incarnation, n.worker, n.tag)):
        yield layout.trajectory(name)


def read_table(path: Path, *, verify: bool = True, digest: str | None = None) -> Any:
    """A trajectory file as a ``pyarrow.Table``.

    With ``verify`` the content must match the tag in the file's name and, where given, ``digest``; without it a file of
    any name is parsed as it is, which is for files that were copied under another name.

    Raises:
        CorruptArtefactError: missing, truncated, changed, or not a trajectory file; names path, expected and found.
        FormatVersionError: written by a newer major format version.
        StorageError: it cannot be read.
    """
    data = _read(path)
    if verify:
        _verify(path, data, digest)
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as source:
            _check_format(path, source.schema.metadata or {})
            _check_schema(path, source.schema)
            table = source.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        what = f"{path} is damaged: expected an Arrow file, found {len(data)} bytes that cannot be parsed ({error})"
        raise CorruptArtefactError(what, mend=_MEND) from error
    return table


def verify_trajectories(path: Path, digest: str) -> None:
    """Return only when a trajectory file is what it was when it was committed.

    Raises:
        CorruptArtefactError: missing, truncated or changed.
        StorageError: it cannot be read.
    """
    _verify(path, _read(path), digest)


def read_trajectories(path: Path, groups: Collection[int] | None = None, digest: str | None = None) -> list[Trajectory]:
    """Trajectories of a verified file, sorted by group and sample; only those of ``groups`` where given.

    Raises:
        CorruptArtefactError: the file is damaged, or lacks one of ``groups``.
        FormatVersionError: written by a newer major format version.
    """
    table = read_table(path, digest=digest)
    if groups is not None:
        table = table.filter(pc.is_in(table["group_id"], value_set=pa.array(sorted(groups), type=pa.int64())))
    try:
        trajectories = from_table(table)
        for trajectory in trajectories:
            trajectory.validate()
    except ValueError as error:
        raise CorruptArtefactError(f"{path} holds a row that no writer commits: {error}", mend=_MEND) from error
    missing = set(groups or ()) - {trajectory.group_id for trajectory in trajectories}
    if missing:
        raise CorruptArtefactError(f"{path}: expected groups {sorted(missing)}, which it does not hold", mend=_MEND)
    return trajectories


def read_metadata(table: Any) -> FileMetadata:
    """What the file of a table from :func:`read_table` says about itself."""
    return FileMetadata.from_arrow(table.schema.metadata)


def _parse_name(text: str) -> TrajectoryName | None:
    try:
        return TrajectoryName.parse(text)
    except ValueError:
        return None


def _read(path: Path) -> bytes:
    data = read_optional(path)
    if data is None:
        raise CorruptArtefactError(f"{path} is missing; expected a trajectory file", mend=_MEND, unseen=path)
    return data


def _verify(path: Path, data: bytes, digest: str | None) -> None:
    found = digest_bytes(data)
    name = _parse_name(path.name)
    if name is None and digest is None:
        raise CorruptArtefactError(
            f"{path}: expected a name that carries a digest (as the writer gives), found {path.name!r}",
            mend="give the file its name back, or read it without verification",
        )
    unseen = None if data.endswith(TRAJECTORY_END) else path
    if digest is not None and found != digest:
        what = f"{path} is damaged: expected {digest}, found {found}"
        raise CorruptArtefactError(what, mend=_MEND, unseen=unseen)
    if name is not None and content_tag(found) != name.tag:
        what = f"{path} is damaged: expected a digest that begins xxh128:{name.tag}, found {found}"
        raise CorruptArtefactError(what, mend=_MEND, unseen=unseen)


def _check_format(path: Path, metadata: dict[bytes, bytes]) -> None:
    text = metadata.get(KEY_FORMAT, b"").decode(errors="replace")
    major = text.partition(".")[0]
    if not (major.isascii() and major.isdigit()):
        what = f"{path}: expected a format version under {KEY_FORMAT.decode()!r} in its metadata, found {text!r}"
        raise CorruptArtefactError(what, mend="this is not a trajectory file of a run; give another path")
    if int(major) > FORMAT_VERSION[0]:
        raise FormatVersionError(
            f"{path}: format {text} is newer than the {FORMAT_VERSION[0]} that this version reads",
            mend="read this run with a newer milesbatch",
        )
    try:
        FileMetadata.from_arrow(metadata)
    except (KeyError, UnicodeDecodeError) as error:
        raise CorruptArtefactError(f"{path}: its metadata lacks {error}", mend=_MEND) from error


def _check_schema(path: Path, found: Any) -> None:
    try:
        expected = trajectory_schema(expert_bytes_of(found))
    except (KeyError, AttributeError):
        expected = trajectory_schema()
    if found.equals(expected):
        return
    lines = [
        f"{name}: expected {_field(expected, name)}, found {_field(found, name)}" for name in _names(expected, found)
    ]
    raise CorruptArtefactError(f"{path} has another schema than a trajectory file: {'; '.join(lines)}", mend=_MEND)


def _names(expected: Any, found: Any) -> list[str]:
    names = dict.fromkeys([*expected.names, *found.names])
    return [name for name in names if _field(expected, name) != _field(found, name)] or ["order of columns"]


def _field(schema: Any, name: str) -> str:
    index = schema.get_field_index(name)
    return "no such column" if index < 0 else str(schema.field(index))
