"""The layout in which Miles publishes weights and SGLang's ``/pull_weights`` follows them: names, indexes, checksums.

Owns how a version is spelled and what its index says; never touches tensors. Invariant: what :func:`read_index` returns names
only files beside the index, and a base that is older than the version. The page behind it is ``docs/format-miles.md``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.store.durable import read_optional, storage_error

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
COMPRESSION = "zstd"
XOR, OVERWRITE = "xor", "overwrite"
XXH3 = "xxh3-128"
_OF_DELTAS = frozenset({"base_version", "compression_format", "checksum_format"})
_NAME = re.compile(r"weight_v(\d{6,})")


class Checksum(Protocol):
    """A running checksum."""

    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """What the index of a version says. ``base`` is None for a full checkpoint; the fields of a delta are then empty."""

    version: int
    directory: Path
    files: Mapping[str, frozenset[str]]
    """File beside the index -> its tensors. Empty for a full checkpoint without an index."""
    base: int | None = None
    encoding: str = ""
    checksum: str = ""
    weights_digest: str | None = None
    """Of the whole version, as only ``milesbatch weights export`` writes it."""
    digests: Mapping[str, str] | None = None
    """Relative path -> digest of the other files of a full checkpoint; from the same writer."""


def version_name(version: int) -> str:
    """Directory of a version: six digits or more."""
    return f"weight_v{version:06d}"


def file_name(number: int, count: int) -> str:
    """Payload file ``number`` (from 0) of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def published_versions(directory: Path) -> list[int]:
    """Versions that have a directory, ascending.

    Raises:
        StorageError: it cannot be listed. InputError: it does not exist.
    """
    try:
        found = (_NAME.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
        numbers = (int(match[1]) for match in found if match)
        return sorted(number for number in numbers if (directory / version_name(number)).is_dir())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{directory} is not a directory", mend="give the one that holds weight_v000001") from None
    except OSError as error:
        raise storage_error(directory, error) from error


def new_checksum(name: str, path: Path) -> Checksum:
    """The checksum that an index names; ``path`` is of that index.

    Raises:
        InputError: it is not known, or needs a package that is not installed.
    """
    if name == XXH3:
        return xxhash.xxh3_128()
    if name == "adler32":
        return _Adler32()
    if name != "blake3":
        raise InputError(f"{path}: checksum {name!r} is not known", mend="known are xxh3-128, adler32 and blake3")
    try:
        from blake3 import blake3  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InputError(f"{path}: its checksums are blake3", mend="pip install blake3") from None
    made: Checksum = blake3()
    return made


def full_index(
    version: int, names: Iterable[str], total_bytes: int, weights_digest: str, digests: Mapping[str, str]
) -> bytes:
    """Index of a full checkpoint in one file. Readers take it for one because it names no ``delta_encoding``."""
    metadata = {
        "version": f"{version:06d}",
        "total_size": total_bytes,
        "weights_digest": weights_digest,
        "files": dict(sorted(digests.items())),
    }
    return _index(metadata, dict.fromkeys(sorted(names), WEIGHTS))


def delta_index(version: int, weight_map: Mapping[str, str], weights_digest: str) -> bytes:
    """Index of an XOR delta on the version before, with xxh3-128 checksums."""
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": XOR,
        "compression_format": COMPRESSION,
        "checksum_format": XXH3,
        "weights_digest": weights_digest,
    }
    return _index(metadata, weight_map)


def _index(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1, ensure_ascii=False) + "\n").encode()


def read_index(directory: Path, version: int) -> VersionIndex | None:
    """The index of a version in ``directory``; None when the version has no directory.

    Raises:
        CorruptArtefactError: it is missing, cut short, or contradicts itself.
        InputError: it asks for something that is not known here.
        StorageError: it cannot be read.
    """
    place = directory / version_name(version)
    if not place.is_dir():
        return None
    path = place / INDEX
    data = read_optional(path)
    if data is None:
        return _without_index(place, version)
    try:
        body = json.loads(data)
        metadata, files = body["metadata"], _files(body["weight_map"])
        return (
            _delta(path, version, metadata, files)
            if "delta_encoding" in metadata
            else _full(path, version, metadata, files)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it is no index ({type(error).__name__}: {error})") from error


def _without_index(place: Path, version: int) -> VersionIndex:
    """Only a single file of the one name is unambiguous: a delta's files may be there before its index."""
    try:
        found = sorted(path.name for path in place.glob("*.safetensors"))
    except OSError as error:
        raise storage_error(place, error) from error
    if found != [WEIGHTS]:
        raise _damaged(place / INDEX, "it is missing: this version is not (wholly) published")
    return VersionIndex(version, place, {})


def _files(weight_map: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """File -> tensors, from tensor -> file."""
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise ValueError(f"tensor {name} lies in {file!r}, which is no file beside the index")
        names.setdefault(file, set()).add(name)
    return {file: frozenset(own) for file, own in sorted(names.items())}


def _full(path: Path, version: int, metadata: Mapping[str, Any], files: Mapping[str, frozenset[str]]) -> VersionIndex:
    if odd := sorted(_OF_DELTAS & set(metadata)):  # taken for a full one, its differences would be the weights
        raise ValueError(f"it has {', '.join(odd)} and no delta_encoding")
    digests = metadata.get("files")
    if digests is not None:
        digests = {str(name): str(digest) for name, digest in digests.items()}
    return VersionIndex(
        version, path.parent, files, weights_digest=_text(metadata.get("weights_digest")), digests=digests
    )


def _delta(path: Path, version: int, metadata: Mapping[str, Any], files: Mapping[str, frozenset[str]]) -> VersionIndex:
    stated, base = int(metadata["version"]), int(metadata["base_version"])
    if stated != version or not 0 <= base < version:
        raise ValueError(f"it is of version {stated} on version {base}")
    encoding, compression = str(metadata["delta_encoding"]), str(metadata["compression_format"])
    if encoding not in (XOR, OVERWRITE):
        raise InputError(f"{path}: delta encoding {encoding!r} is not known", mend="known are xor and overwrite")
    if compression != COMPRESSION:
        raise InputError(f"{path}: compression {compression!r} is not known", mend="known is zstd")
    checksum = str(metadata["checksum_format"])
    new_checksum(checksum, path)
    return VersionIndex(version, path.parent, files, base, encoding, checksum, _text(metadata.get("weights_digest")))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _damaged(path: Path, what: str) -> CorruptArtefactError:
    return CorruptArtefactError(f"{path} cannot be used: {what}", mend="publish this version again, or copy it again")
