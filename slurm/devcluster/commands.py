"""The command line of the development cluster.

Owns: arguments, what is printed, exit codes (0 done, 1 not well or refused, 2 wrong usage). Never: decides how the cluster
works. Invariant: an expected error is one text without a traceback.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from devcluster import packages
from devcluster.cluster import Cluster
from devcluster.configuration import Settings
from devcluster.daemons import CONTROLLER, MUNGE
from devcluster.folder import ClusterError

NODE_ACTIONS = {
    "kill": Cluster.kill_node,
    "kill-slurmd": Cluster.kill_slurmd,
    "stop": Cluster.stop_node,
    "continue": Cluster.continue_node,
    "start": Cluster.start_node,
    "drain": Cluster.drain_node,
    "undrain": Cluster.undrain_node,
}
CONTROLLER_ACTIONS = {
    "restart": Cluster.restart_controller,
    "stop": Cluster.stop_controller,
    "kill": Cluster.kill_controller,
    "start": Cluster.start_controller,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "install":
            print("Slurm is installed" if packages.install() else "Slurm was already installed")
            return 0
        cluster = Cluster(given.dir)
        return int(given.do(cluster, given) or 0)
    except (ClusterError, OSError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devcluster",
        description="A real Slurm of several nodes on this machine, beside whatever is installed on it.",
    )
    parser.add_argument("--dir", help="folder of the cluster (default: $MILESBATCH_CLUSTER_DIR, else .cluster)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("install", help="install Debian's packages of Slurm, starting no service (needs root)")
    up = commands.add_parser("up", help="start all that does not run")
    up.set_defaults(do=_up)
    up.add_argument("--nodes", type=int, help="how many")
    up.add_argument("--gpus", type=int, help="fake GPUs of a node")
    up.add_argument("--cred-expire-s", type=int, help="how long a requeued job waits at least (sites: 120)")
    up.add_argument("--grace-s", type=int, help="GraceTime of the preemptible partitions")
    up.add_argument(
        "--send-user-signal",
        action=argparse.BooleanOptionalAction,
        help="whether a preempted job gets its --signal at once (preempt_send_user_signal)",
    )
    for name, do, text in (
        ("down", _down, "end it and all its jobs"),
        ("env", _env, "print the exports that point Slurm's commands at it, for eval"),
        ("status", _status, "what lives; exit code 1 unless all does"),
        ("clean", _clean, "cancel all jobs, start all nodes"),
    ):
        commands.add_parser(name, help=text).set_defaults(do=do)
    node = commands.add_parser("node", help="do something to nodes")
    node.set_defaults(do=_node)
    node.add_argument("action", choices=NODE_ACTIONS)
    node.add_argument("names", nargs="+", metavar="NAME")
    controller = commands.add_parser("controller", help="do something to slurmctld")
    controller.set_defaults(do=lambda cluster, given: CONTROLLER_ACTIONS[given.action](cluster))
    controller.add_argument("action", choices=CONTROLLER_ACTIONS)
    return parser


def _up(cluster: Cluster, given: argparse.Namespace) -> None:
    names = ("nodes", "gpus", "cred_expire_s", "grace_s", "send_user_signal")
    changes = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    cluster.up(replace(cluster.settings, **changes))
    print(f"{len(cluster.settings.node_names)} nodes are up in {cluster.folder.root}; for this shell:")
    print('  eval "$(make -s cluster-env)"')


def _down(cluster: Cluster, given: argparse.Namespace) -> None:
    cluster.down()


def _clean(cluster: Cluster, given: argparse.Namespace) -> None:
    cluster.clean()


def _env(cluster: Cluster, given: argparse.Namespace) -> int:
    # Another user cannot see the processes of root's cluster, but may use it.
    if not cluster.is_up() and not (cluster.folder.configuration.exists() and cluster.controller_answers()):
        print(f"error: no cluster is up in {cluster.folder.root}\n  what to do: make cluster-up", file=sys.stderr)
        return 1
    print(f"export SLURM_CONF={shlex.quote(cluster.env['SLURM_CONF'])}")
    program = str(Path(packages.program("sbatch")).parent)
    if program not in os.environ.get("PATH", "").split(os.pathsep):
        print(f'export PATH="$PATH":{shlex.quote(program)}')
    return 0


def _node(cluster: Cluster, given: argparse.Namespace) -> None:
    for name in given.names:
        NODE_ACTIONS[given.action](cluster, name)


def _status(cluster: Cluster, given: argparse.Namespace) -> int:
    parts = cluster.daemons.parts()
    settings: Settings = cluster.settings
    states = cluster.node_states() if CONTROLLER in parts and cluster.controller_answers() else {}
    print(cluster.folder.root)
    for name in (MUNGE, CONTROLLER):
        print(f"  {name:10} {'up' if name in parts else 'down'}")
    well = MUNGE in parts and bool(states)
    for name in settings.node_names:
        lives = bool(cluster.daemons.slurmd(name, parts))
        jobs = len(parts.get(f"job/{name}", []))
        print(f"  {name:10} {'up' if lives else 'down':6} {states.get(name, 'unknown'):12} {jobs} processes of jobs")
        well = well and lives
    return 0 if well else 1
