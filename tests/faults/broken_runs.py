"""What tests of broken runs have in common: a fault plan, a clear error, a sound end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from command import Ended, milesbatch, wait_until

from milesbatch.store.durable import digest_file

STOPPED_AT = 6
"""The step in which the fixture ``stopped`` lost its trainer."""
STOPPED_SETTINGS = ("--set", "weights.keyframe_every=1", "--set", "checkpoint.every=1", "--set", "rollout.workers=1")
"""What it was started with: every start of a copy needs the first one."""


def plan(path: Path, *faults: dict[str, Any]) -> Path:
    """Write a fault plan; a fault without a name is named after its place in it."""
    named = [{"name": f"fault-{number}", **fault} for number, fault in enumerate(faults)]
    path.write_text(yaml.safe_dump({"faults": named}))
    return path


def fired(run: Path) -> dict[str, dict[str, Any]]:
    """Faults that happened: name -> what the injector noted just before."""
    records = {path.name.split(".")[1]: path.read_text() for path in (run / "events").glob("fault.*.fired")}
    return {name: json.loads(text) for name, text in records.items() if text.endswith("}")}


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """``directory`` as ``make`` filled it: by the test process that comes first, while the others wait."""
    try:
        directory.mkdir()
    except FileExistsError:
        made = wait_until(lambda: list(directory.glob("made.*")), f"another test process has made {directory.name}")
        assert made[0].name == "made.well", f"another test process could not make {directory.name}"
        return directory
    outcome = "badly"
    try:
        make(directory)
        outcome = "well"
    finally:
        (directory / f"made.{outcome}").touch()
    return directory


def copied(run: Path, place: Path) -> Path:
    """A copy that may be broken."""
    shutil.copytree(run, place)
    return place


def check_clear(ended: Ended, code: int, *words: str) -> None:
    """One error that says what is wrong and what to do, and no traceback."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err, ended.err
    assert "error: " in ended.err
    assert "what to do: " in ended.err
    for word in words:
        assert word in ended.err, ended.err


def content(root: Path) -> dict[str, str]:
    """Digest of every file: two of these are equal when nothing was touched."""
    return {str(path.relative_to(root)): digest_file(path) for path in sorted(root.rglob("*")) if path.is_file()}


def check_sound(run: Path, cache: Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """The audit finds nothing wrong; returns what it says."""
    ended = milesbatch("audit", run, "--json", cache=cache, prefix=prefix)
    assert ended.code == 0, ended.out + ended.err
    body: dict[str, Any] = json.loads(ended.out)
    assert (body["groups"]["lost"], body["groups"]["repeated"]) == (0, 0)
    return body
