"""Python and the packages that milesbatch needs, as they are installed here. Imports none of them.

Invariant: what is wanted comes from milesbatch's own metadata, so that this never disagrees with what ``pip`` would
install.
"""

from __future__ import annotations

import importlib.metadata
import operator
import platform
import re
import sys
from dataclasses import dataclass

from milesbatch.doctor.verdict import Check, bad, ok, unchecked, warn

_AREA = "python"
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(?P<bounds>[^;]*)(?:;(?P<marker>.*))?")
_COMPARE = {
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A package, and which versions will do."""

    name: str
    bounds: tuple[tuple[str, str], ...]
    """Pairs such as (``>=``, ``2.7``)."""
    extra: str | None
    """Needed only with this extra (``train``: on compute nodes)."""

    def fits(self, version: str) -> bool:
        return all(_COMPARE[sign](_numbers(version), _numbers(bound)) for sign, bound in self.bounds)


def package_checks() -> list[Check]:
    """Python, the packages that every host needs, and those that compute nodes need besides."""
    found = [ok(_AREA, "version", f"{platform.python_version()} at {sys.executable}")]
    try:
        requirements = importlib.metadata.requires("milesbatch") or []
    except importlib.metadata.PackageNotFoundError:
        return [
            *found,
            unchecked(_AREA, "packages", "milesbatch is not installed, only found on Python's path", "pip install it"),
        ]
    wanted = [parsed for text in requirements if (parsed := parse_requirement(text)) is not None]
    base = [package for package in wanted if package.extra is None]
    train = [package for package in wanted if package.extra == "train"]
    return [*found, _base_check(base), _train_check(train)]


def installed_versions() -> dict[str, str]:
    """Name -> version of what is installed of milesbatch and of the packages that it names, Python included."""
    versions = {"python": platform.python_version()}
    try:
        requirements = importlib.metadata.requires("milesbatch") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    names = [parsed.name for text in requirements if (parsed := parse_requirement(text)) is not None]
    for name in ["milesbatch", *names]:
        if (version := _installed(name)) is not None:
            versions[name] = version
    return versions


def parse_requirement(text: str) -> Wanted | None:
    """A line of ``Requires-Dist``; None for one that only developers or other systems need."""
    match = _REQUIREMENT.fullmatch(text.strip())
    if match is None:
        return None
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", match["marker"] or "")
    if extra is not None and extra[1] != "train":
        return None
    bounds = re.findall(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)", match["bounds"])
    return Wanted(match["name"], tuple(bounds), extra[1] if extra else None)


def _base_check(wanted: list[Wanted]) -> Check:
    missing, untested = _wrong(wanted)
    if missing:
        mend = "pip install --upgrade milesbatch"
        return bad(_AREA, "packages", "; ".join([*missing, *untested]), "milesbatch does not work without", mend)
    if untested:
        return _untested("packages", untested)
    own = _installed("milesbatch")
    return ok(_AREA, "packages", f"milesbatch {own}, and all {len(wanted)} that it needs on every host")


def _train_check(wanted: list[Wanted]) -> Check:
    missing, untested = _wrong(wanted)
    if missing:
        return warn(
            _AREA,
            "packages for training",
            "; ".join([*missing, *untested]),
            "enough to submit, watch and audit from here; compute nodes need them",
            "where roles run: pip install 'milesbatch[train]'",
        )
    if untested:
        return _untested("packages for training", untested)
    shown = ", ".join(f"{name} {_installed(name)}" for name in ("torch", "transformers"))
    return ok(_AREA, "packages for training", f"all {len(wanted)} ({shown})")


def _untested(name: str, found: list[str]) -> Check:
    meaning = "newer than what this version of milesbatch was made for; it may work"
    return warn(
        _AREA, name, "; ".join(found), meaning, "when something fails in them, install the versions that are wanted"
    )


def _wrong(wanted: list[Wanted]) -> tuple[list[str], list[str]]:
    """What is missing or too old, and what is newer than is wanted."""
    missing: list[str] = []
    untested: list[str] = []
    for package in wanted:
        version = _installed(package.name)
        bounds = ",".join(sign + bound for sign, bound in package.bounds)
        if version is None:
            missing.append(f"{package.name} is not installed")
        elif not package.fits(version):
            lower = [_numbers(bound) for sign, bound in package.bounds if sign in (">=", ">", "==")]
            is_old = any(_numbers(version) < bound for bound in lower)
            (missing if is_old else untested).append(f"{package.name} is {version}, wanted {bounds}")
    return missing, untested


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, without zeros at their end: ``2.13.0+cpu`` is (2, 13)."""
    numbers = [int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
