"""Slurm's commands as scripts with prepared answers, in a directory of their own on PATH: for unit tests.

What they answer was recorded from Slurm 22.05 where a test says so. Each call is remembered.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_HEAD = """#!/bin/sh
printf '%s' {name} >> {calls}
for word in "$@"; do printf '\\t%s' "$word" >> {calls}; done
printf '\\n' >> {calls}
said="$*"
"""
_ANSWER = """case "$said" in {pattern})
  printf '%s' {out}
  printf '%s' {err} >&2
  exit {status};;
esac
"""
_SBATCH = """n=0
[ -f {counter} ] && read n < {counter}
n=$((n + 1))
echo $n > {counter}
/bin/cat "$1" > {scripts}/$n.sh
echo "Submitted batch job $((100 + n))"
"""


@dataclass(frozen=True)
class Call:
    """One call of a command."""

    command: str
    arguments: tuple[str, ...]


class PreparedSlurm:
    """Commands that answer nothing and succeed, until told otherwise. ``sbatch`` gives job ids from 101 on."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "bin"
        self.scripts = directory / "scripts"
        self._calls = directory / "calls"
        self._counter = directory / "counter"
        self._answers: dict[str, list[str]] = {name: [] for name in COMMANDS}
        for made in (self.path, self.scripts):
            made.mkdir(parents=True)
        for name in COMMANDS:
            self._write(name)

    def answer(self, command: str, out: str = "", err: str = "", status: int = 0, when: str = "") -> None:
        """From now on ``command`` answers so, if ``when`` is part of its arguments; what was said later is tried first."""
        pattern = f"*{shlex.quote(when)}*" if when else "*"
        text = _ANSWER.format(pattern=pattern, out=shlex.quote(out), err=shlex.quote(err), status=status)
        self._answers[command].insert(0, text)
        self._write(command)

    def hang(self, command: str) -> None:
        """``command`` never answers."""
        self._answers[command].insert(0, "exec /bin/sleep 60\n")
        self._write(command)

    def remove(self, command: str) -> None:
        (self.path / command).unlink()

    @property
    def calls(self) -> list[Call]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [Call(name, tuple(words)) for name, *words in (line.split("\t") for line in lines)]

    def said_to(self, command: str) -> list[tuple[str, ...]]:
        """Arguments of each call of one command."""
        return [call.arguments for call in self.calls if call.command == command]

    def submitted(self) -> list[str]:
        """Texts of the scripts that sbatch took, in order."""
        return [path.read_text() for path in sorted(self.scripts.glob("*.sh"), key=lambda path: int(path.stem))]

    def _write(self, name: str) -> None:
        places = {"calls": shlex.quote(str(self._calls)), "counter": shlex.quote(str(self._counter))}
        text = _HEAD.format(name=name, **places) + "".join(self._answers[name])
        if name == "sbatch":
            text += _SBATCH.format(scripts=shlex.quote(str(self.scripts)), **places)
        path = self.path / name
        path.write_text(text)
        path.chmod(0o755)
