"""The development cluster is a real Slurm: jobs run, nodes die and return, and nothing is left when it ends."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from devcluster import packages
from devcluster.cluster import Cluster, ClusterError
from devcluster.commands import main
from devcluster.folder import Folder
from devcluster.processes import Process, look, send
from own_clusters import SETTINGS, end_abandoned, new_cluster

SMALL = replace(SETTINGS, nodes=2)
REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "slurm" / "devcluster"
IS_ROOT = os.geteuid() == 0


def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def daemons(cluster: Cluster) -> list[Process]:
    parts = cluster.daemons.parts()
    return [process for part in sorted(parts) if not part.startswith("job/") for process in parts[part]]


def task_on(cluster: Cluster, node: str) -> Process:
    """The one ``sleep`` that a job runs on the node; Slurm calls a job running a moment before it has processes."""

    def tasks() -> list[Process]:
        return [process for process in cluster.daemons.part(f"job/{node}") if process.command == "sleep"]

    until(tasks)
    (task,) = tasks()
    return task


def script(body: str) -> str:
    return f"#!/bin/sh\n{body}\n"


@pytest.fixture
def own() -> Iterator[Cluster]:
    """A second cluster, not started."""
    made = new_cluster()
    yield made
    made.down()
    shutil.rmtree(made.folder.root, ignore_errors=True)


# -- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["trainer", "rollout", "rollout_cancel", "high"])
def test_each_partition_runs_steps_with_fake_gpus(cluster: Cluster, partition: str) -> None:
    command = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    step = ["srun", "--partition", partition, "--nodes=2", "--gres=gpu:2", "sh", "-c", command]
    assert sorted(cluster.run(step).stdout.splitlines()) == ["n1 0,1", "n2 0,1"]
    assert set(cluster.run(["srun", "-p", partition, "-N8", "hostname"]).stdout.split()) == {os.uname().nodename}


def test_a_heterogeneous_job_runs_in_two_partitions(cluster: Cluster, tmp_path: Path) -> None:
    directives = "#SBATCH -p trainer -N1 --gres=gpu:4\n#SBATCH hetjob\n#SBATCH -p rollout -N2 --gres=gpu:1\n"
    steps = "; ".join(
        f"srun --het-group={group} sh -c 'echo {group} $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'" for group in (0, 1)
    )
    job = cluster.sbatch(f"#!/bin/sh\n{directives}{steps}\n", "-o", tmp_path / "out")
    components = cluster.wait_job(job)
    assert [(c.component, c.partition, c.state, c.leader) for c in components] == [
        (0, "trainer", "COMPLETED", job),
        (1, "rollout", "COMPLETED", job),
    ]
    lines = sorted(line.split() for line in (tmp_path / "out").read_text().splitlines())
    assert [(group, gpus) for group, _, gpus in lines] == [("0", "0,1,2,3"), ("1", "0"), ("1", "0")]
    assert len({node for _, node, _ in lines}) == 3


def test_jobs_run_as_who_submits_them(cluster: Cluster) -> None:
    other = "nobody" if IS_ROOT else None
    name = other or getpass.getuser()
    assert cluster.run(["srun", "-p", "rollout", "id", "-un"], user=other, cwd="/tmp").stdout == f"{name}\n"


def start_soon(cluster: Cluster, job: int) -> None:
    """Not to wait for ``cred_expire``. ``now`` is too early: in the second of the requeue a node refuses the job for good."""
    cluster.run(["scontrol", "update", f"jobid={job}", "StartTime=now+2"])


# -- nodes -----------------------------------------------------------------------------------------------------------

# Three that a node's end must reach: in the step; detached; detached without environment and parent.
# It has no output either: Slurm takes a step whose output is held open for unfinished, for minutes.
DETACHED = "sleep {0}1 & setsid sleep {0}2 & (env -i setsid sleep {0}3 >/dev/null 2>&1 &) ; sleep {0}4"


def sleepers(prefix: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"^sleep {prefix}[1-4]$"], capture_output=True, text=True, check=False)
    living = (look(int(pid)) for pid in found.stdout.split())
    return [process.pid for process in living if process is not None]


def test_a_killed_node_is_down_soon_and_its_job_starts_again_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    prefix = f"7{os.getpid() % 10000:04d}"
    body = "echo $SLURM_JOB_NODELIST >>out; srun sh -c '" + DETACHED.format(prefix) + "'"
    job = cluster.sbatch(script(body), "-N2", "-p", "trainer", "-o", tmp_path / "log", cwd=tmp_path)
    until(lambda: len(sleepers(prefix)) == 8)
    began = time.monotonic()
    cluster.kill_node("n2")
    assert len(sleepers(prefix)) == 4, "n1 is another machine"
    assert not cluster.daemons.on_nodes(["n2"])
    cluster.wait_nodes(["n2"], "down", within_s=20)
    detected_s = time.monotonic() - began
    assert 2 < detected_s < 15, detected_s
    assert cluster.wait_job(job, "PENDING")[0].restarts == 1
    # Slurm ends n1's step, but not what left its session: a site without cgroups keeps such processes.
    start_soon(cluster, job)
    cluster.wait_job(job, "RUNNING")
    until(lambda: len((tmp_path / "out").read_text().splitlines()) == 2)
    assert "2" not in (tmp_path / "out").read_text().splitlines()[1]
    cluster.start_node("n2")
    cluster.wait_nodes(["n2"], "idle", within_s=10)
    cluster.clean()
    assert sleepers(prefix) == []


def test_slurmd_alone_may_die_and_return(cluster: Cluster) -> None:
    job = cluster.sbatch(script("sleep 2"), "-N1", "-p", "trainer", "-o", "/dev/null")
    cluster.wait_job(job, "RUNNING")
    task = task_on(cluster, "n1")
    cluster.kill_slurmd("n1")
    assert look(task.pid) == look(task.pid) is not None
    cluster.start_node("n1")
    assert cluster.wait_job(job)[0].state == "COMPLETED"


def test_a_stopped_node_hangs_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    job = cluster.sbatch(script(f"while sleep 0.1; do echo x >>{ticks}; done"), "-p", "rollout", "-o", "/dev/null")
    until(lambda: ticks.exists() and ticks.stat().st_size > 4)
    cluster.stop_node("n1")
    stopped_at = ticks.stat().st_size
    assert {process.state for process in cluster.daemons.on_nodes(["n1"])} == {"T"}
    cluster.wait_nodes(["n1"], "down", within_s=20)
    assert ticks.stat().st_size == stopped_at
    cluster.run(["scancel", str(job)])
    # The zombie: Slurm gave the job up, its process wakes and writes.
    cluster.continue_node("n1")
    until(lambda: ticks.stat().st_size > stopped_at)


def test_a_drained_node_takes_no_job(cluster: Cluster) -> None:
    for name in ("n1", "n2"):
        cluster.drain_node(name)
    assert cluster.run(["srun", "-p", "trainer", "sh", "-c", "echo $SLURMD_NODENAME"]).stdout == "n3\n"
    refused = cluster.run(["srun", "-p", "trainer", "-w", "n1", "--immediate=1", "true"], check=False)
    assert refused.returncode != 0
    cluster.undrain_node("n1")
    cluster.run(["srun", "-p", "trainer", "-w", "n1", "true"])


def test_clean_mends_everything(cluster: Cluster) -> None:
    stubborn = "trap '' TERM CONT; setsid sleep 600 & while :; do sleep 0.1; done"
    job = cluster.sbatch(script(stubborn), "-N1", "-p", "trainer", "-o", "/dev/null")
    pending = cluster.sbatch(script("sleep 600"), "-N8", "--exclusive", "-p", "trainer", "-o", "/dev/null")
    cluster.wait_job(job, "RUNNING")
    cluster.kill_node("n2")
    cluster.stop_node("n3")
    cluster.kill_slurmd("n4")
    cluster.drain_node("n5")
    cluster.kill_controller()
    cluster.clean()
    assert set(cluster.node_states().values()) == {"idle"}
    assert all(found.has_ended for number in (job, pending) for found in cluster.jobs(number))
    assert [part for part in cluster.daemons.parts() if part.startswith("job/")] == []


# -- preemption and the controller -----------------------------------------------------------------------------------

LISTENER = """#!{python}
import signal, time
def say(word):
    with open("{path}", "a") as out:
        print(word, file=out)
signal.signal(signal.SIGUSR1, lambda number, frame: say("SIGUSR1"))
signal.signal(signal.SIGTERM, lambda number, frame: exit(say("SIGTERM")))
say("start")
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(("notice", "grace_s"), [(True, SETTINGS.grace_s), (False, 0)], ids=["announced", "at once"])
def test_a_high_job_takes_nodes_from_rollout(cluster: Cluster, tmp_path: Path, notice: bool, grace_s: int) -> None:
    cluster.up(replace(SETTINGS, send_user_signal=notice, grace_s=grace_s))
    out = tmp_path / "out"
    listener = LISTENER.format(python=sys.executable, path=out)
    low = cluster.sbatch(listener, "-p", "rollout", "-N6", "--exclusive", "--signal=B:USR1@60", "-o", "/dev/null")
    safe = cluster.sbatch(script("sleep 600"), "-p", "trainer", "-N2", "--exclusive", "-o", "/dev/null")
    cluster.wait_job(safe, "RUNNING")
    until(lambda: out.exists() and out.read_text())
    began = time.monotonic()
    high = cluster.sbatch(script("sleep 600"), "-p", "high", "-N2", "--exclusive", "-o", "/dev/null")
    if notice:
        until(lambda: "SIGUSR1" in out.read_text(), within_s=5)
    cluster.wait_job(high, "RUNNING")
    assert grace_s <= time.monotonic() - began < 25
    cluster.run(["scancel", str(high)])
    assert cluster.wait_job(low, "PENDING")[0].restarts == 1
    start_soon(cluster, low)
    until(lambda: out.read_text().split().count("start") == 2)
    expected = ["start", *(["SIGUSR1"] if notice else []), "SIGTERM", "start"]
    assert out.read_text().split()[: len(expected)] == expected
    assert cluster.jobs(safe)[0].state == "RUNNING"


def test_rollout_cancel_ends_what_is_preempted(cluster: Cluster) -> None:
    cluster.up(replace(SETTINGS, grace_s=0))
    low = cluster.sbatch(script("sleep 600"), "-p", "rollout_cancel", "-N8", "--exclusive", "-o", "/dev/null")
    cluster.wait_job(low, "RUNNING")
    cluster.run(["srun", "-p", "high", "-N2", "true"])
    assert [job.state for job in cluster.wait_job(low)] == ["PREEMPTED"]


@pytest.mark.parametrize("end", [Cluster.stop_controller, Cluster.kill_controller], ids=["SIGTERM", "SIGKILL"])
def test_jobs_live_through_a_restart_of_the_controller(cluster: Cluster, end: Callable[[Cluster], None]) -> None:
    job = cluster.sbatch(script("sleep 5"), "-p", "trainer", "-o", "/dev/null")
    cluster.wait_job(job, "RUNNING")
    task = task_on(cluster, "n1")
    if end is Cluster.kill_controller:
        cluster.wait_saved()
    end(cluster)
    assert not cluster.controller_answers()
    assert look(task.pid) is not None
    cluster.start_controller()
    assert cluster.jobs(job)[0].state == "RUNNING"
    assert (cluster.wait_job(job)[0].state, cluster.jobs(job)[0].restarts) == ("COMPLETED", 0)


# -- life ------------------------------------------------------------------------------------------------------------


def test_two_clusters_side_by_side(cluster: Cluster, own: Cluster) -> None:
    began = time.monotonic()
    own.up(SMALL)
    assert time.monotonic() - began < 15
    before = {process.pid for process in own.processes()}
    own.up()
    assert {process.pid for process in own.processes()} == before, "up again starts nothing"
    jobs = [made.sbatch(script("sleep 600"), "-o", "/dev/null") for made in (cluster, own)]
    for made, job in zip((cluster, own), jobs, strict=True):
        made.wait_job(job, "RUNNING")
    others = {process.pid for process in daemons(cluster)}
    with pytest.raises(ClusterError, match="nodes: 2 -> 3"):
        own.up(replace(SMALL, nodes=3))
    own.down()
    own.down()
    assert own.processes() == []
    assert {process.pid for process in daemons(cluster)} == others
    assert cluster.jobs(jobs[0])[0].state == "RUNNING"


def test_the_commands_of_the_readme(own: Cluster) -> None:
    environment = {**os.environ, "MILESBATCH_CLUSTER_DIR": str(own.folder.root)}
    lines = """
        make -s cluster-up
        eval "$(make -s cluster-env)"
        srun -N8 -p rollout --gres=gpu:1 sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES' | sort
        make -s cluster-down
        make -s cluster-down
        """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-8:] == [f"n{number} 0" for number in range(1, 9)]
    assert own.processes() == []


def test_up_after_a_crash_of_everything(own: Cluster, tmp_path: Path) -> None:
    own.up(SMALL)
    first = own.sbatch(script("sleep 600"), "-o", "/dev/null")
    own.wait_job(first, "RUNNING")
    task = task_on(own, "n1")
    for process in daemons(own):
        send(process, signal.SIGKILL)
    until(lambda: not daemons(own))
    assert look(task.pid) is not None
    # Pid files that now name somebody else, as after a reboot.
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **own.env}) as bystander:
        for name in ("slurmctld", "munged", "n1", "n2"):
            (own.folder.root / "pids" / name).write_text(f"{bystander.pid}\n")
        own.up()
        second = own.sbatch(script("true"), "-o", "/dev/null")
        assert own.wait_job(second)[0].state == "COMPLETED"
        assert second > first + 1000, "an id of the first life never means a job of the second"
        assert look(task.pid) is None, "what the crash left behind is gone"
        own.down()
        assert bystander.poll() is None
        bystander.kill()


def test_the_cluster_of_a_killed_test_process_is_ended(own: Cluster) -> None:
    own.up(SMALL)
    with subprocess.Popen(["sleep", "600"]) as owner:
        started = look(owner.pid)
        assert started is not None
        (own.folder.root / "owner").write_text(f"{owner.pid} {started.started}")
        end_abandoned()
        assert own.is_up(), "its owner lives"
        owner.kill()
    end_abandoned()
    assert own.processes() == []
    assert not own.folder.root.exists()


def test_as_an_ordinary_user(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="milesbatch-user-", dir="/tmp"))
    shutil.copytree(SOURCES, folder / "devcluster", ignore=shutil.ignore_patterns("__pycache__"))
    identity, name = [], getpass.getuser()
    if IS_ROOT:
        identity, name = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"], "nobody"
        os.chown(folder, 65534, 65534)
    environment = {"PATH": "/usr/bin:/bin", "MILESBATCH_CLUSTER_DIR": str(folder / "c")}

    def run(*command: str) -> str:
        done = subprocess.run(
            [*identity, *command], cwd="/", env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # An interpreter in root's home is out of reach for others.
    python = next(p for p in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3") if readable(p, identity))
    tool = (python, str(folder / "devcluster"))
    try:
        run(*tool, "up", "--nodes", "2")
        step = "srun -N2 --gres=gpu:1 sh -c 'echo $(id -un) $CUDA_VISIBLE_DEVICES'"
        shown = run("sh", "-c", f'eval "$({" ".join(tool)} env)"; {step}')
        assert shown.splitlines() == [f"{name} 0"] * 2
        run(*tool, "node", "kill", "n2")
        run(*tool, "node", "start", "n2")
        run(*tool, "status")
    finally:
        run(*tool, "down")
        assert Cluster(folder / "c").processes() == []
        shutil.rmtree(folder)


def readable(python: str, identity: list[str]) -> bool:
    # Through a shell, for setpriv itself still has root's capabilities when it executes a program.
    command = [*identity, "sh", "-c", f"exec {python} -c ''"]
    return subprocess.run(command, cwd="/", check=False, capture_output=True).returncode == 0


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "thesis").write_text("years")
    assert main(["--dir", str(tmp_path), "up"]) == 1
    assert "holds files that are not a development cluster's" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["state", "thesis"]


def test_a_path_that_sockets_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="shorter path"):
        Folder.at(tmp_path / ("x" * 100))
    with pytest.raises(ClusterError, match="plain path"):
        Folder.at("/tmp/two words")


def test_commands_against_nothing(own: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(own.folder.root)
    assert main(["--dir", folder, "env"]) == 1
    assert main(["--dir", folder, "node", "kill", "n1"]) == 1
    assert main(["--dir", folder, "node", "kill", "n99"]) == 1
    assert main(["--dir", folder, "status"]) == 1
    said = capsys.readouterr()
    assert said.err.count("make cluster-up") == 2 and "no node 'n99'" in said.err
    assert "slurmctld  down" in said.out


def test_a_reused_pid_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        now = look(bystander.pid)
        assert now is not None
        send(Process(now.pid, now.parent, now.state, now.command, now.started - 1), signal.SIGKILL)
        time.sleep(0.1)
        assert bystander.poll() is None
        send(now, signal.SIGKILL)
        assert bystander.wait() == -signal.SIGKILL


def test_what_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PROGRAMS", ("slurmctld-of-nowhere",))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"slurmctld-of-nowhere not installed\n  what to do: .*install"):
        packages.install()


def test_an_installation_starts_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(packages, "POLICY", policy)
    monkeypatch.setattr(packages, "LOCK", tmp_path / "lock")
    seen = []
    monkeypatch.setattr(packages, "_apt", lambda *words, fatal: seen.append(subprocess.run([policy], check=False)))
    monkeypatch.setattr(packages, "missing", lambda: ["munged"] if len(seen) < 2 else [])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert packages.install()
    assert [done.returncode for done in seen] == [101, 101]
    assert not policy.exists()
    policy.write_text("#!/bin/sh\nexit 0\n")
    policy.chmod(0o755)
    seen.clear()
    packages.install()
    assert policy.read_text() == "#!/bin/sh\nexit 0\n", "the system's own policy stays"
