"""A development cluster: up, down, and the failures that one may want to try.

Owns: the order in which daemons start and end. Never: touches another Slurm on the machine. Invariant: ``up`` and
``down`` may be repeated, and work after any crash, for what lives is read from the processes themselves.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from devcluster import packages
from devcluster.client import Client
from devcluster.configuration import Settings, choose_ports, fixed_differences, write_configuration
from devcluster.daemons import CONTROLLER, MUNGE, Daemons, wait_until
from devcluster.folder import ClusterError, Folder
from devcluster.keeper import ENDED
from devcluster.processes import Process

_STARTS = 3
_UP_WITHIN_S = 30.0
_JOBS_END_WITHIN_S = 1.5
_SAVED_WITHIN_S = 6.0


class Cluster(Client):
    """The cluster in one folder; any number of these may speak of the same one. Times are in seconds."""

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(Folder.default() if folder is None else Folder.at(folder))
        self.daemons = Daemons(self.folder)

    # -- life --------------------------------------------------------------------------------------------------------

    def up(self, settings: Settings | None = None) -> None:
        """Start all that does not run, and return when each node is fit for jobs; without ``settings`` those of last time.

        A cluster of which slurmctld or a node lives goes on with its jobs; else it begins without any.

        Raises:
            ClusterError: Slurm is not installed and cannot be; the settings cannot change while it runs; a daemon did not
                start (with the last lines that it wrote).
        """
        packages.install()
        with self.folder.locked():
            self.folder.create()
            settings = settings or self.settings
            if self.is_up():
                self._go_on(settings)
            else:
                self._begin(settings)

    def is_up(self) -> bool:
        """Whether slurmctld or any node lives."""
        return any(part == CONTROLLER or part.startswith("keeper/") for part in self.daemons.parts())

    def _begin(self, settings: Settings) -> None:
        record = self.folder.read_settings()
        life, port = _number(record, "life", -1) + 1, _number(record, "base_port", 0)
        for attempt in range(_STARTS):
            self.daemons.end_all()
            self._wipe(settings)
            port = choose_ports(settings.nodes + 1, port if attempt == 0 else 0)
            self.folder.write_settings({"settings": asdict(settings), "life": life, "base_port": port})
            self._configure(settings, port, life)
            try:
                self._start_missing(settings, afresh=True)
                break
            except ClusterError:
                # Another program may take a port after it was chosen; and slurmctld was seen to end at once without a word.
                if attempt == _STARTS - 1 or (attempt and not self._outputs_have("Address already in use")):
                    self.daemons.end_all()
                    raise

    def _go_on(self, settings: Settings) -> None:
        before, record = self.settings, self.folder.read_settings()
        if differing := fixed_differences(before, settings):
            raise ClusterError(
                f"the running cluster in {self.folder.root} has other settings: {'; '.join(differing)}\n"
                "  what to do: end it first (down), or use another folder"
            )
        if settings != before:
            self.folder.write_settings({**record, "settings": asdict(settings)})
            self._configure(settings, _number(record, "base_port", 0), _number(record, "life", 0))
            self.daemons.end(CONTROLLER)
        self._start_missing(settings, afresh=False)

    def _start_missing(self, settings: Settings, *, afresh: bool) -> None:
        self.daemons.start_munged()
        begins = not self.daemons.part(CONTROLLER)
        self.daemons.start_controller(afresh=afresh)
        self._wait_controller()
        self.daemons.start_nodes(settings.node_names)
        if begins and not afresh:
            # Also has slurmctld ask its nodes at once how they are; by itself it does so after 4 s.
            self.run(["scontrol", "reconfigure"])
        check = self._check_all if afresh else self._check_controller
        self.wait_nodes(settings.node_names, within_s=_UP_WITHIN_S, check=check)

    def _configure(self, settings: Settings, base_port: int, life: int) -> None:
        write_configuration(self.folder, settings, packages.version(), base_port, life)

    def _wipe(self, settings: Settings) -> None:
        """Nothing of an earlier life is left but its logs, in ``log.old``."""
        root = self.folder.root
        shutil.rmtree(root / "log.old", ignore_errors=True)
        (root / "log").rename(root / "log.old")
        for name in ("state", "spool", "pids"):
            shutil.rmtree(root / name)
        self.folder.munge_socket.unlink(missing_ok=True)
        self.folder.create()
        for name in settings.node_names:
            (root / "spool" / name).mkdir()

    def _outputs_have(self, words: str) -> bool:
        return any(words in path.read_text(errors="replace") for path in (self.folder.root / "log").glob("*.out"))

    def _wait_controller(self) -> None:
        def answers() -> bool:
            self._check_controller()
            return self.controller_answers()

        wait_until(answers, lambda: f"slurmctld; see {self.folder.log(CONTROLLER)}", _UP_WITHIN_S)

    def _check_controller(self) -> None:
        if not self.daemons.part(CONTROLLER):
            raise self._ended(CONTROLLER, self.folder.output(CONTROLLER))

    def _check_all(self) -> None:
        """For a cluster that begins: its outputs are new."""
        self._check_controller()
        for name in self.settings.node_names:
            output = self.folder.output(name)
            if output.exists() and ENDED in output.read_text(errors="replace"):
                raise self._ended(f"slurmd of {name}", output)

    def _ended(self, daemon: str, output: Path) -> ClusterError:
        last = "\n    ".join(output.read_text(errors="replace").splitlines()[-5:])
        return ClusterError(f"{daemon} ended; {output} has:\n    {last}")

    def down(self) -> None:
        """End the cluster with all its jobs; nothing of it is left running. Its logs stay."""
        if not self.folder.root.exists() and not self.processes():
            return
        with self.folder.locked():
            if self.daemons.part(CONTROLLER):
                with contextlib.suppress(ClusterError):
                    self.cancel_all()
            self.daemons.end_all()

    def clean(self, settings: Settings | None = None, within_s: float = 60.0) -> None:
        """No job is left and every node is idle, whatever was done to the cluster; ``settings`` as for :meth:`up`."""
        if self.daemons.part(CONTROLLER):
            with contextlib.suppress(ClusterError):
                self.cancel_all()
        self.up()
        self.cancel_all()
        for name, state in self.node_states().items():
            if state.startswith("drain"):
                self.undrain_node(name)
        with contextlib.suppress(ClusterError):
            self.wait_nodes(None, "idle", within_s=_JOBS_END_WITHIN_S)
        if busy := [name for name, state in self.node_states().items() if state != "idle"]:
            self._clear(busy)
            self.wait_nodes(None, "idle", within_s=within_s)
        self.daemons.kill_leftovers()
        if settings not in (None, self.settings):
            self.up(settings)
            self.wait_nodes(None, "idle", within_s=within_s)

    def _clear(self, names: Sequence[str]) -> None:
        """Nodes whose jobs do not end start anew; Slurm forgets what it believed to run there only when they were down."""
        for name in names:
            self.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=clean"])
        self.daemons.kill_nodes(names)
        self.daemons.start_nodes(names)
        for name in names:
            self.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)

    def processes(self) -> list[Process]:
        """All living processes of the cluster and of its jobs; empty when it is down."""
        return self.daemons.everything()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def kill_node(self, name: str) -> None:
        """SIGKILL slurmd, slurmstepd and all that jobs started on the node, detached or not: as if it lost power."""
        with self._node(name):
            self.daemons.kill_nodes([name])

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL slurmd alone: Slurm loses the node, its jobs go on."""
        with self._node(name):
            self.daemons.kill_slurmd(name)

    def stop_node(self, name: str) -> None:
        """SIGSTOP everything on the node: it hangs. What it was doing goes on after :meth:`continue_node`."""
        with self._node(name):
            self.daemons.stop_nodes([name])

    def continue_node(self, name: str) -> None:
        """SIGCONT everything on the node."""
        with self._node(name):
            self.daemons.continue_nodes([name])

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """Start a killed node, or its slurmd; with ``wait`` return when Slurm finds it fit for jobs."""
        with self._node(name):
            self.daemons.start_nodes([name])
        if wait:
            wait_until(lambda: bool(self.daemons.slurmd(name)), lambda: f"slurmd of {name}", _UP_WITHIN_S)
            self.wait_nodes([name])

    @contextlib.contextmanager
    def _node(self, name: str) -> Iterator[None]:
        if name not in self.settings.node_names:
            raise ClusterError(f"no node {name!r}; there are {' '.join(self.settings.node_names)}")
        if not self.is_up():
            raise ClusterError(f"no cluster is up in {self.folder.root}\n  what to do: make cluster-up")
        with self.folder.locked():
            yield

    # -- controller --------------------------------------------------------------------------------------------------

    def restart_controller(self) -> None:
        """End slurmctld with SIGTERM and start it again; jobs go on meanwhile."""
        self.stop_controller()
        self.start_controller()

    def stop_controller(self) -> None:
        """End slurmctld with SIGTERM: it saves its state."""
        with self.folder.locked():
            self.daemons.end(CONTROLLER)

    def kill_controller(self) -> None:
        """SIGKILL slurmctld: what it had not saved is lost, see :meth:`wait_saved`.

        A job that it forgets keeps its processes, and its id may be given again; one that it remembers as pending starts twice.
        """
        with self.folder.locked():
            self.daemons.end(CONTROLLER, kill=True)

    def wait_saved(self) -> None:
        """Return when slurmctld has saved what happened until now: it does so at most 5 s later, if there is anything."""
        state, now = self.folder.root / "state" / "job_state", time.time()
        with contextlib.suppress(ClusterError):
            wait_until(lambda: state.exists() and state.stat().st_mtime > now, lambda: "", _SAVED_WITHIN_S)

    def start_controller(self) -> None:
        """Start slurmctld with the state it saved; returns when it answers."""
        with self.folder.locked():
            self.daemons.start_munged()
            self.daemons.start_controller()
            self._wait_controller()


def _number(record: dict[str, object], name: str, default: int) -> int:
    value = record.get(name, default)
    return value if isinstance(value, int) else default


__all__ = ["CONTROLLER", "MUNGE", "Cluster", "ClusterError", "Settings"]
