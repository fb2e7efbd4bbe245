"""The daemons of one cluster as processes: munged, slurmctld, and a keeper with its slurmd for each node.

Owns: starting them, finding them, ending them. Never: asks Slurm anything. Invariant: each is found by the mark it was
started with, so nothing is left behind by a command that was killed half-way, and nothing else is ever signalled.
"""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from devcluster import packages
from devcluster.folder import ClusterError, Folder
from devcluster.processes import MARK, Process, kill_all, marked, send, send_until, table, with_descendants
from devcluster.processes import end as end_processes

CONTROLLER = "slurmctld"
MUNGE = "munged"
_KEEPER = Path(__file__).with_name("keeper.py")
_FIRST_TO_DIE = ("slurmd", "slurmstepd")


def wait_until(condition: Callable[[], bool], what: Callable[[], str], within_s: float) -> None:
    """Look at ``condition`` until it holds.

    Raises:
        ClusterError: it did not within ``within_s`` seconds; says ``what`` was waited for.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {within_s:g} s for {what()}")
        time.sleep(0.05)


class Daemons:
    """Processes of the cluster in ``folder``; holds no state but the children to collect."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._children: list[subprocess.Popen[bytes]] = []

    # -- finding -----------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, list[Process]]:
        """Part of the cluster -> its living processes; see :func:`devcluster.processes.marked`."""
        self._children = [child for child in self._children if child.poll() is None]
        return marked(self.folder.root, table().values())

    def part(self, name: str) -> list[Process]:
        """Living processes of one part; empty when it does not run."""
        return self.parts().get(name, [])

    def on_nodes(self, names: Iterable[str] | None = None, *, keepers: bool = True) -> list[Process]:
        """All of these nodes (of all, for None): slurmd, slurmstepd, whatever jobs started, and their keepers if wanted.

        Those that daemons end through come first, so that none of them sees a job end before it ends itself.
        """
        wanted = None if names is None else set(names)
        processes = table()
        parts = marked(self.folder.root, processes.values())
        of_nodes = {part: found for part, found in parts.items() if "/" in part}
        roots = [p for part, found in of_nodes.items() if wanted is None or _node_of(part) in wanted for p in found]
        spared = (
            set() if keepers else {p.pid for part, found in parts.items() if part.startswith("keeper/") for p in found}
        )
        found = [process for process in with_descendants(roots, processes) if process.pid not in spared]
        return sorted(found, key=lambda process: process.command not in _FIRST_TO_DIE)

    def slurmd(self, name: str, parts: dict[str, list[Process]] | None = None) -> list[Process]:
        """The node's slurmd: one or none."""
        parts = self.parts() if parts is None else parts
        keepers = {keeper.pid for keeper in parts.get(f"keeper/{name}", [])}
        # What slurmd forks on its way to slurmstepd has the same name and mark for a moment, but is younger.
        found = parts.get(f"slurmd/{name}", [])
        return [process for process in found if process.command == "slurmd" and process.parent in keepers][:1]

    def everything(self) -> list[Process]:
        """All processes of the cluster, with those of its jobs."""
        processes = table()
        parts = marked(self.folder.root, processes.values())
        return with_descendants([process for found in parts.values() for process in found], processes)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start_munged(self) -> None:
        """Start munged if it does not run; returns when it answers."""
        if self.part(MUNGE):
            return
        folder = self.folder
        if not folder.munge_key.exists() or not folder.munge_key.stat().st_size:
            folder.munge_key.touch(0o600)
            folder.munge_key.write_bytes(secrets.token_bytes(128))
        # --force: only warn where a directory above the folder is open to others; the key itself is not.
        names = {"key-file": folder.munge_key, "socket": folder.munge_socket}
        names |= {"pid-file": folder.root / "pids" / MUNGE, "seed-file": folder.root / "munge" / "seed"}
        options = [f"--{name}={path}" for name, path in names.items()]
        command = [packages.program(MUNGE), "--foreground", "--force", "--num-threads=2", *options]
        self._start(MUNGE, command, MUNGE, folder.root / "munge")
        wait_until(self._munged_answers, lambda: f"munged; see {folder.output(MUNGE)}", 10)

    def _munged_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.folder.munge_socket)) == 0

    def start_controller(self, *, afresh: bool = False) -> None:
        """Start slurmctld if it does not run: with the jobs and node states that it saved, or ``afresh`` without."""
        if not self.part(CONTROLLER):
            command = [packages.program(CONTROLLER), "-D", "-f", str(self.folder.configuration)]
            directory = self.folder.root / "state"
            self._start(CONTROLLER, command + (["-c"] if afresh else []), CONTROLLER, directory)

    def start_nodes(self, names: Iterable[str]) -> None:
        """Start what is missing of these nodes: all, or slurmd; stopped ones go on."""
        names = list(names)
        self.continue_nodes(names)
        parts = self.parts()
        for name in names:
            keepers, slurmd = parts.get(f"keeper/{name}"), self.slurmd(name, parts)
            if not keepers:
                if any(_node_of(part) == name for part in parts):
                    # Jobs that outlived their keeper: a machine that starts has none.
                    self.kill_nodes([name])
                self._start_node(name)
            elif not slurmd:
                send(keepers[0], signal.SIGUSR1)

    def _start_node(self, name: str) -> None:
        mark = f"{MARK}={self.folder.root}:slurmd/{name}"
        command = [str(_KEEPER), name, str(self.folder.configuration), packages.program("slurmd"), mark]
        directory = self.folder.root / "spool" / name
        # A SIGUSR1 before the keeper is ready for it would end it: blocked from its birth, the signal waits instead.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self._start(f"keeper/{name}", [sys.executable, "-I", "-S", *command], name, directory)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start(self, part: str, command: list[str], output: str, directory: Path) -> None:
        """In the background, marked as ``part``. The directory matters: it marks what the daemon starts in its turn."""
        environment = {
            MARK: f"{self.folder.root}:{part}",
            "SLURM_CONF": str(self.folder.configuration),
            "PATH": packages.search_path(),
            "LC_ALL": "C",
        }
        with self.folder.output(output).open("ab") as sink:
            child = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self._children.append(child)

    # -- ending ------------------------------------------------------------------------------------------------------

    def kill_nodes(self, names: Iterable[str] | None = None) -> None:
        """SIGKILL all processes of these nodes (all, for None), as when they lose power; returns when none is left."""
        # Keepers go last: until then whatever loses its parent stays within reach.
        kill_all(lambda: self.on_nodes(names, keepers=False))
        kill_all(lambda: self.on_nodes(names))
        self.parts()

    def kill_leftovers(self) -> None:
        """SIGKILL what jobs left behind on nodes where none runs: processes that detached themselves from a step."""

        def leftovers() -> list[Process]:
            daemons = {p.pid for part, found in self.parts().items() if not part.startswith("job/") for p in found}
            return [process for process in self.everything() if process.pid not in daemons]

        kill_all(leftovers)

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL the node's slurmd alone; its jobs go on."""
        for process in self.slurmd(name):
            send(process, signal.SIGKILL)
        wait_until(lambda: not self.slurmd(name), lambda: f"the end of slurmd of {name}", 10)

    def stop_nodes(self, names: Iterable[str]) -> None:
        """SIGSTOP all processes of these nodes: they hang, and nothing in them knows."""
        send_until(signal.SIGSTOP, lambda: self.on_nodes(names), lambda process: process.state in "Tt")

    def continue_nodes(self, names: Iterable[str]) -> None:
        """SIGCONT all processes of stopped nodes."""
        send_until(signal.SIGCONT, lambda: self.on_nodes(names), lambda process: process.state not in "Tt")

    def end(self, part: str, *, kill: bool = False) -> None:
        """End munged or slurmctld: SIGTERM, on which slurmctld saves its state, or SIGKILL."""
        (kill_all if kill else end_processes)(lambda: self.part(part))

    def end_all(self) -> None:
        """End the whole cluster; returns when no process of it is left."""
        self.end(CONTROLLER)
        self.kill_nodes()
        self.end(MUNGE)
        kill_all(self.everything)
        self.parts()


def _node_of(part: str) -> str:
    return part.partition("/")[2]
