"""The folder of a development cluster: everything it writes is in here.

Owns: the paths, the lock, the record of settings. Never: starts or ends a process. Invariant: two clusters share nothing
when their folders differ. Unix socket addresses hold 107 bytes (unix(7)), which limits how long the folder's own path may be.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 107 - len("/spool/n99/n99_1234567.4294967295")
DIRECTORIES = {"etc": 0o755, "gpus": 0o755, "spool": 0o755, "log": 0o755, "munge": 0o711, "pids": 0o700, "state": 0o700}


class ClusterError(Exception):
    """The development cluster cannot do what was asked; the text says why and what to do."""


@dataclass(frozen=True)
class Folder:
    """Paths of one cluster; ``root`` is absolute and without symbolic links, for it also names the cluster's processes."""

    root: Path

    @classmethod
    def at(cls, path: str | Path) -> Folder:
        """The folder at ``path``, which need not exist.

        Raises:
            ClusterError: Slurm's socket addresses would be too long, or its files could not name the path.
        """
        root = Path(path).resolve()
        if len(os.fsencode(root)) > _LONGEST:
            raise ClusterError(
                f"{root} has {len(os.fsencode(root))} bytes; sockets of Slurm in it need at most {_LONGEST}\n"
                "  what to do: set MILESBATCH_CLUSTER_DIR to a shorter path"
            )
        if any(character in str(root) for character in " \t\n#,%:=[]\"'"):
            raise ClusterError(
                f"{str(root)!r} has a character that Slurm's configuration cannot hold\n"
                "  what to do: set MILESBATCH_CLUSTER_DIR to a plain path"
            )
        return cls(root)

    @classmethod
    def default(cls) -> Folder:
        """``$MILESBATCH_CLUSTER_DIR``, else ``.cluster`` in the repository."""
        return cls.at(os.environ.get("MILESBATCH_CLUSTER_DIR") or Path(__file__).parents[2] / ".cluster")

    @property
    def configuration(self) -> Path:
        """``slurm.conf``: what ``SLURM_CONF`` names."""
        return self.root / "etc" / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        """The secret that the cluster's daemons and clients share."""
        return self.root / "munge" / "key"

    @property
    def munge_socket(self) -> Path:
        """Where munged answers."""
        return self.root / "munge" / "socket"

    @property
    def settings(self) -> Path:
        """Settings, ports and number of lives, as JSON."""
        return self.root / "cluster.json"

    def log(self, part: str) -> Path:
        """What a daemon says: ``slurmctld``, ``munged`` or the name of a node."""
        return self.root / "log" / f"{part}.log"

    def output(self, part: str) -> Path:
        """What a daemon prints before it has a log."""
        return self.root / "log" / f"{part}.out"

    def create(self) -> None:
        """Make the directories; idempotent. Only root's clusters are open to other users of the machine."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755 if os.geteuid() == 0 else 0o700)
        for name, mode in DIRECTORIES.items():
            (self.root / name).mkdir(exist_ok=True)
            (self.root / name).chmod(mode)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time changes the cluster; others wait.

        Raises:
            ClusterError: the folder holds something else: nothing in it is touched.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lock = self.root / "cluster.lock"
        if not lock.exists() and any(self.root.iterdir()):
            raise ClusterError(
                f"{self.root} holds files that are not a development cluster's\n"
                "  what to do: set MILESBATCH_CLUSTER_DIR to an empty or new folder"
            )
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read_settings(self) -> dict[str, object]:
        """What the last ``up`` recorded; empty before the first."""
        try:
            found = json.loads(self.settings.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_settings(self, record: dict[str, object]) -> None:
        """Replace the record as a whole."""
        beside = self.settings.with_suffix(".new")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(self.settings)
