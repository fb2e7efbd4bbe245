"""Policy versions of a run in another store: what is kept there, under which keys, and of which run it is.

Owns the names and the identity; moves nothing (:mod:`milesbatch.weights.mirror_push`, :mod:`milesbatch.weights.mirror_pull`).
Invariant: keys are the paths that the run itself uses, so a store that is a directory looks like a pulled copy. The page
behind it is ``docs/storage.md``.

    run.json                    of which run; there only when model/ is whole
    model/config.json, …        configuration and tokenizer, no weights
    weights/000013/…            payload, then manifest.json
"""

from __future__ import annotations

from pathlib import Path

from milesbatch.errors import CorruptArtefactError, InputError
from milesbatch.ids import parse_number
from milesbatch.records import FileRef, RunRecord, WeightsManifest
from milesbatch.store.layout import RunLayout
from milesbatch.store.port import ArtefactStore, check_key
from milesbatch.weights.materialize import is_weights_file

_KEYS = RunLayout(Path())

RUN_KEY = _KEYS.run_record.as_posix()
_MEND = "delete it and push that version again, or choose another version"
WEIGHTS_PREFIX = _KEYS.weights.as_posix()


def version_prefix(version: int) -> str:
    """Directory of a version, as a key."""
    return _KEYS.weights_version(version).as_posix()


def manifest_key(version: int) -> str:
    """Key of a version's manifest."""
    return _KEYS.weights_manifest(version).as_posix()


def listed_versions(store: ArtefactStore) -> set[int]:
    """Versions with a manifest, as the store lists them: may be stale."""
    found = set()
    for key in store.list_keys(WEIGHTS_PREFIX):
        try:
            version = parse_number(key.split("/")[1])
        except (ValueError, IndexError):
            continue
        if key == manifest_key(version):
            found.add(version)
    return found


def model_refs(record: RunRecord) -> tuple[FileRef, ...]:
    """Configuration and tokenizer among the files of ``run.json``, with paths that are keys.

    Raises:
        KeyRefusedError: one of them leads out of the run.
    """
    below = f"{_KEYS.model.as_posix()}/"
    refs = tuple(ref for ref in record.files if ref.path.startswith(below) and not is_weights_file(ref.path))
    for ref in refs:
        check_key(ref.path)
    return refs


def parse_manifest(data: bytes, place: str, version: int) -> WeightsManifest:
    """The manifest of just this version.

    Raises:
        CorruptArtefactError: it is damaged, or of another version.
    """
    try:
        manifest = WeightsManifest.from_bytes(data, place)
    except CorruptArtefactError as error:
        raise CorruptArtefactError(error.what, mend=_MEND, unseen=error.unseen) from error
    if manifest.version != version:
        raise CorruptArtefactError(f"{place} is the manifest of version {manifest.version}", mend=_MEND)
    return manifest


def same_run(mine: bytes, theirs: bytes, here: str, there: str) -> None:
    """Return when two ``run.json`` are one.

    Raises:
        InputError: they are of different runs; names both.
    """
    if mine != theirs:
        names = [RunRecord.from_bytes(data, place).run_id for data, place in ((mine, here), (theirs, there))]
        raise InputError(
            f"{here} is of run {names[0]}, {there} of run {names[1]}", mend="give each run a place of its own"
        )
