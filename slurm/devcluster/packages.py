"""Slurm's programs, from Debian's packages.

Owns: where the programs are; installing them without starting a service. Never: writes a configuration of Slurm for the
system, or depends on a service of it. Invariant: after an installation no slurmctld, slurmd or munged runs that did not run
before. The packages would start munged; ``/usr/sbin/policy-rc.d`` says no (invoke-rc.d(8)).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.folder import ClusterError

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
LOCK = Path("/run/milesbatch-install.lock")
POLICY = Path("/usr/sbin/policy-rc.d")
_SYSTEM_PATHS = "/usr/sbin:/sbin:/usr/local/sbin"


def search_path() -> str:
    """``PATH`` with the directories of daemons, which an ordinary user's may lack."""
    return os.environ.get("PATH", os.defpath) + ":" + _SYSTEM_PATHS


def missing() -> list[str]:
    """Programs that are not on this machine."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


def program(name: str) -> str:
    """Absolute path of a program.

    Raises:
        ClusterError: it is not installed; says with which command it would be.
    """
    found = shutil.which(name, path=search_path())
    if found is None:
        raise ClusterError(f"{name} is not installed\n  what to do: {_advice()}")
    return found


def _advice() -> str:
    if shutil.which("apt-get") is None:
        return "install Slurm (slurmctld, slurmd and its commands) and munge with this system's package manager"
    return f"sudo {sys.executable} {Path(__file__).parent} install"


def version() -> tuple[int, ...]:
    """Version of the installed Slurm, for example (22, 5, 8)."""
    said = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, check=False).stdout
    return tuple(int(number) for number in re.findall(r"[0-9]+", said)[:3])


def install() -> bool:
    """Install what is missing; returns whether anything was. One at a time on a machine; others wait.

    Raises:
        ClusterError: not root, no apt, or apt failed; says what to do.
    """
    if not missing():
        return False
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"{', '.join(missing())} not installed\n  what to do: {_advice()}")
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing():
            with _no_service_starts():
                _apt("update", fatal=False)
                _apt("install", "--yes", "--no-install-recommends", *PACKAGES, fatal=True)
    if missing():
        raise ClusterError(f"{', '.join(PACKAGES)} are installed, yet there is no {', '.join(missing())}")
    return True


def _apt(*arguments: str, fatal: bool) -> None:
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if fatal and done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-10:])
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}:\n{last}")


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Packages start no service meanwhile. A policy that is already there is the system's own, and stays."""
    try:
        with open(POLICY, "x") as policy:
            policy.write("#!/bin/sh\n# Written while milesbatch installs Slurm; may be deleted.\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink(missing_ok=True)
