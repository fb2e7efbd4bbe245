"""Value types that cross processes and files: one text form each, a strict parser, no I/O.

Group ids, steps, policy versions and incarnations are plain ``int``; this module owns how they are spelled in names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIGEST = re.compile(r"xxh128:[0-9a-f]{32}")
_POLICY_REF = re.compile(r"(?P<run>[A-Za-z0-9._-]+)@(?P<version>0|[1-9][0-9]*):(?P<digest>xxh128:[0-9a-f]{32})")
NUMBER = r"(?:[0-9]{6}|[1-9][0-9]{6,})"
"""Exactly what :func:`number` writes, as a regular expression."""
WORKER = r"[a-z]+(?:-[a-z]+)*-(?:0|[1-9][0-9]*)"
"""The name of a process, as a regular expression."""
_WORKER = re.compile(WORKER)


def number(value: int) -> str:
    """Spell a step, version or incarnation in a file name: six digits or more, sorts as text up to 999,999.

    Raises:
        ValueError: the value is negative.
    """
    if value < 0:
        raise ValueError(f"a step, version or incarnation cannot be negative: {value}")
    return f"{value:06d}"


def parse_number(text: str) -> int:
    """Inverse of :func:`number`; strict: exactly the text that ``number`` would write.

    Raises:
        ValueError: the text is not such a number.
    """
    if not text.isascii() or not text.isdigit() or number(int(text)) != text:
        raise ValueError(f"not a six-digit number: {text!r}")
    return int(text)


def check_digest(text: str) -> str:
    """Return ``text`` when it is a digest (``xxh128:`` and 32 hexadecimal digits).

    Raises:
        ValueError: it is not.
    """
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"not a digest (xxh128:<32 hex digits>): {text!r}")
    return text


def check_worker_name(text: str) -> str:
    """Return ``text`` when it is a process name such as ``rollout-0`` or ``trainer-1``.

    Raises:
        ValueError: it is not.
    """
    if not _WORKER.fullmatch(text):
        raise ValueError(f"not a process name such as 'rollout-0': {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """Which weights: a run's policy version together with the digest that proves it."""

    run_id: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.run_id}@{self.version}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> PolicyRef:
        """Inverse of ``str``.

        Raises:
            ValueError: the text is not a policy reference.
        """
        match = _POLICY_REF.fullmatch(text)
        if match is None:
            raise ValueError(f"not a policy reference (run@version:digest): {text!r}")
        return cls(match["run"], int(match["version"]), match["digest"])


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From generated token ``start`` on (0-based, of the response), tokens were drawn under policy ``version``."""

    start: int
    version: int
