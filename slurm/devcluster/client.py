"""Slurm's own commands against one cluster, and waiting for what they show.

Owns: the environment that points a command at the cluster; reading squeue and sinfo. Never: starts or ends a daemon.
Invariant: the caller's own Slurm, if there is one, is never asked.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from devcluster import packages
from devcluster.configuration import Settings
from devcluster.daemons import wait_until
from devcluster.folder import ClusterError, Folder
from devcluster.jobs import Job, read_jobs

_UNFIT = ("down", "unknown", "fail", "inval", "unk")


class Client:
    """Commands against the cluster in ``folder``. Times are in seconds."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    @property
    def settings(self) -> Settings:
        """Those of the last ``up``; the defaults before the first."""
        record = self.folder.read_settings().get("settings", {})
        return Settings.read(record if isinstance(record, dict) else {})

    @property
    def env(self) -> dict[str, str]:
        """What to add to an environment so that Slurm's commands speak to this cluster."""
        return {"SLURM_CONF": str(self.folder.configuration), "PATH": packages.search_path()}

    def run(
        self,
        command: Sequence[str | Path],
        *,
        check: bool = True,
        user: str | None = None,
        cwd: str | Path | None = None,
        stdin: str = "",
        within_s: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster, as ``user`` if given (only root can); the result has the text of both streams.

        The caller's own ``SLURM_*`` and ``SBATCH_*`` variables are left out.

        Raises:
            ClusterError: it did not end ``within_s``; with ``check``, its status was not 0 (tells what it said).
        """
        foreign = ("SLURM", "SBATCH", "SRUN", "SQUEUE", "SINFO", "SCANCEL")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        identity: dict[str, Any] = {}
        if user is not None:
            entry = pwd.getpwnam(user)
            identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            environment |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user}
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words,
                env={**environment, **self.env, **(env or {})},
                cwd=cwd,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=within_s,
                check=False,
                **identity,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{' '.join(words)} did not end within {within_s:g} s") from error
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise ClusterError(f"{' '.join(words)} ended with {done.returncode}: {said}")
        return done

    def sbatch(self, script: str, *options: str | Path, user: str | None = None, cwd: str | Path | None = None) -> int:
        """Submit a script's text; returns the job id (the leader's of a heterogeneous job)."""
        done = self.run(["sbatch", "--parsable", *options], stdin=script, user=user, cwd=cwd)
        return int(done.stdout.strip().split(";")[0])

    def jobs(self, job_id: int | None = None) -> list[Job]:
        """Jobs and components, ended ones too: all, or those whose id or leader is ``job_id``."""
        found = read_jobs(self.run(["squeue", "--json"]).stdout)
        return [job for job in found if job_id is None or job_id in (job.id, job.leader)]

    def node_states(self) -> dict[str, str]:
        """Node -> state as sinfo spells it: ``idle``, ``mixed``, ``down*`` (``*``: it does not answer)."""
        lines = self.run(["sinfo", "--noheader", "--Node", "--partition=high", "--format=%N|%T"]).stdout.split()
        return dict(line.split("|", 1) for line in lines)

    def cancel_all(self) -> None:
        """Cancel every job that has not ended; returns without waiting for their processes."""
        ids = [str(job.leader) for job in self.jobs() if not job.has_ended]
        if ids:
            self.run(["scancel", *sorted(set(ids))], check=False)

    def drain_node(self, name: str) -> None:
        """No new job starts on the node; running ones go on."""
        self.run(["scontrol", "update", f"nodename={name}", "state=drain", "reason=asked"])

    def undrain_node(self, name: str) -> None:
        """Undo a drain; nothing when there is none."""
        self.run(["scontrol", "update", f"nodename={name}", "state=undrain"], check=False)

    def controller_answers(self) -> bool:
        """Whether slurmctld answers now."""
        return self.run(["scontrol", "ping"], check=False).returncode == 0

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_job(self, job_id: int, *states: str, within_s: float = 60.0) -> list[Job]:
        """Wait until every component of the job is in one of ``states`` (none given: has ended); returns them.

        Raises:
            ClusterError: they were not ``within_s``; tells what they were.
        """
        found: list[Job] = []

        def settled() -> bool:
            with contextlib.suppress(ClusterError):  # the controller may be away for a moment
                found[:] = self.jobs(job_id)
            return bool(found) and all(job.state in states if states else job.has_ended for job in found)

        wanted = f"{' or '.join(states) or 'the end'} of job {job_id}"
        wait_until(settled, lambda: f"{wanted}; it is {found}", within_s)
        return found

    def wait_nodes(
        self,
        names: Iterable[str] | None = None,
        *states: str,
        within_s: float = 30.0,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Wait until each node (all for None) is in one of ``states``; none given: until it answers and may run jobs.

        ``check`` is called between two looks, and may raise to end the waiting.

        Raises:
            ClusterError: they were not ``within_s``; tells what they were.
        """
        wanted = list(self.settings.node_names if names is None else names)
        found: dict[str, str] = {}

        def settled() -> bool:
            if check is not None:
                check()
            with contextlib.suppress(ClusterError):
                found.update(self.node_states())
            return all(_is_wanted(found.get(name, "unknown"), states) for name in wanted)

        wait_until(
            settled,
            lambda: f"nodes {' '.join(wanted)} to be {' or '.join(states) or 'fit'}; they are {found}",
            within_s,
        )


def _is_wanted(state: str, states: Sequence[str]) -> bool:
    if states:
        return state in states or (state.startswith("down") and state.rstrip("*") in states)
    return not (state.endswith("*") or state.startswith(_UNFIT))
