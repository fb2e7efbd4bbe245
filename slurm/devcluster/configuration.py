"""Settings of a cluster, and the files that Slurm reads.

Owns: the templates' values, the choice of ports. Never: starts anything. Invariant: the written files are a function of
settings, ports, life and folder alone.
"""

from __future__ import annotations

import os
import pwd
import random
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import Template

from devcluster.folder import ClusterError, Folder

_HERE = Path(__file__).parent
_LOWEST_PORT, _HIGHEST_PORT = 20000, 32000  # below what the kernel gives to clients (ip_local_port_range)
_JOBS_PER_LIFE = 10000


@dataclass(frozen=True)
class Settings:
    """What may differ between two clusters. Times are in seconds; ``SWITCHES`` may change while a cluster runs."""

    nodes: int = 8
    cpus: int = 4
    gpus: int = 4
    memory_mb: int = 64000
    send_user_signal: bool = True
    cred_expire_s: int = 5
    grace_s: int = 6
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 3
    message_timeout_s: int = 2

    @property
    def node_names(self) -> list[str]:
        """``n1`` and so on."""
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @classmethod
    def read(cls, record: dict[str, object]) -> Settings:
        """From JSON; what an older version did not know has its default."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in known})  # type: ignore[arg-type]


SWITCHES = frozenset({"send_user_signal", "cred_expire_s", "grace_s"})


def fixed_differences(before: Settings, after: Settings) -> list[str]:
    """Settings that differ and cannot change while the cluster runs."""
    old, new = asdict(before), asdict(after)
    return [f"{name}: {old[name]} -> {new[name]}" for name in old if old[name] != new[name] and name not in SWITCHES]


def choose_ports(count: int, first_choice: int = 0) -> int:
    """First of ``count`` neighbouring ports that are free now: ``first_choice`` if it is, else drawn at random.

    Another program may take one before the daemons do; they say so, and the caller draws again.
    """
    draw = random.SystemRandom()
    candidates = [first_choice] if first_choice else []
    candidates += [draw.randrange(_LOWEST_PORT, _HIGHEST_PORT - count) for _ in range(100)]
    for base in candidates:
        if all(_is_free(port) for port in range(base, base + count)):
            return base
    raise ClusterError(f"no {count} neighbouring free ports between {_LOWEST_PORT} and {_HIGHEST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Like Slurm's own sockets: connections of an earlier life that are in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def write_configuration(
    folder: Folder, settings: Settings, version: tuple[int, ...], base_port: int, life: int
) -> None:
    """Write what this ``version`` of Slurm reads: the controller's port is ``base_port``, the nodes' follow it.

    Job ids of each ``life`` begin elsewhere, so that an id in a run directory never means a job of a later cluster.
    """
    last = settings.nodes
    values = {
        **asdict(settings),
        "folder": folder.root,
        "user": _user(),
        "controller_port": base_port,
        "node_ports": f"[{base_port + 1}-{base_port + last}]",
        "nodes": f"n[1-{last}]",
        "gpu_numbers": f"0-{settings.gpus - 1}",
        "first_job_id": life * _JOBS_PER_LIFE + 1,
        # Later versions have a word for none; to the earlier ones this plugin is the one that does nothing by itself.
        "cgroup_plugin": "disabled" if version >= (23, 11) else "cgroup/v1",
        "send_user_signal": "SlurmctldParameters=preempt_send_user_signal" if settings.send_user_signal else "",
    }
    for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
        text = Template((_HERE / f"{name}.template").read_text()).substitute(values)
        beside = folder.root / "etc" / f"{name}.new"
        beside.write_text(text)
        beside.chmod(0o644)
        beside.replace(folder.root / "etc" / name)
    for number in range(settings.gpus):
        link = folder.root / "gpus" / f"nvidia{number}"
        if not link.is_symlink():
            link.symlink_to("/dev/null")
