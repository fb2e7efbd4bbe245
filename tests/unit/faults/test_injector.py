"""Each fault really happens, once in a run's life, and says so; without a plan nothing is in the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from milesbatch.errors import RunFailedError, StorageError, StorageFullError
from milesbatch.faults import points
from milesbatch.faults.injector import Injector, arm_from, damage, fired_path
from milesbatch.faults.plan import Fault, FaultPlan
from milesbatch.faults.points import point
from milesbatch.store.durable import make_directory, publish_file, remove_tree, replace_hint
from milesbatch.store.layout import RunLayout
from milesbatch.store.operations import Operations, current, install


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    found = RunLayout(tmp_path / "run")
    for directory in found.directories():
        directory.mkdir(parents=True)
    return found


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    points.set_hook(None)
    install(Operations())


def fault(**fields: Any) -> Fault:
    return Fault.model_validate(
        {"name": "f", "role": "trainer-0", "point": "trainer.recorded", "action": "raise", **fields}
    )


def arm(layout: RunLayout, *faults: Fault, process: str = "trainer-0") -> Injector:
    injector = Injector(FaultPlan(faults=faults), process, layout)
    injector.arm()
    return injector


def fired(layout: RunLayout, name: str = "f") -> dict[str, Any] | None:
    path = fired_path(layout, name)
    return json.loads(path.read_text()) if path.exists() else None


def whole(path: Path) -> dict[str, Any] | None:
    """A record that another process may be writing just now; None while it is not there as a whole."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record


# -- nothing is in the way ------------------------------------------------------------------------------------------


def test_without_a_plan_nothing_is_hooked(layout: RunLayout) -> None:
    arm_from(None, "trainer-0", layout)
    assert points._hook is None
    assert type(current()) is Operations
    assert list(layout.events.iterdir()) == []


def test_a_plan_for_other_processes_hooks_nothing(layout: RunLayout) -> None:
    arm(layout, fault(role="rollout", point="rollout.leased"))
    assert points._hook is None
    assert type(current()) is Operations


def test_a_point_costs_less_than_a_microsecond_when_unset() -> None:
    best = min(_seconds_of_points(20_000) for _ in range(5))
    assert best / 20_000 < 1e-6


def _seconds_of_points(count: int) -> float:
    began_s = time.perf_counter()
    for _ in range(count):
        point("trainer.recorded")
    return time.perf_counter() - began_s


# -- when and how often ---------------------------------------------------------------------------------------------


def test_it_fires_at_the_nth_passing_and_never_again(layout: RunLayout) -> None:
    arm(layout, fault(nth=3))
    point("trainer.recorded")
    point("trainer.trained")
    point("trainer.recorded")
    assert fired(layout) is None
    with pytest.raises(RunFailedError, match="fault f"):
        point("trainer.recorded")
    record = fired(layout)
    assert record is not None
    assert (record["process"], record["pid"]) == ("trainer-0", os.getpid())
    assert abs(record["mono_s"] - time.monotonic()) < 60
    for _ in range(5):
        point("trainer.recorded")


def test_a_process_that_was_started_again_does_not_meet_it_again(layout: RunLayout) -> None:
    arm(layout, fault())
    with pytest.raises(RunFailedError):
        point("trainer.recorded")
    before = fired(layout)
    arm(layout, fault())  # as a new process does: its count begins anew
    point("trainer.recorded")
    assert fired(layout) == before


def test_of_two_processes_only_one_is_hit(layout: RunLayout) -> None:
    first = Injector(FaultPlan(faults=(fault(role="trainer"),)), "trainer-0", layout)
    second = Injector(FaultPlan(faults=(fault(role="trainer"),)), "trainer-1", layout)
    with pytest.raises(RunFailedError):
        second.at("trainer.recorded")
    first.at("trainer.recorded")
    assert (fired(layout) or {})["process"] == "trainer-1"


def test_two_faults_at_one_point_fire_one_after_the_other(layout: RunLayout) -> None:
    """The first one's exception takes the passing; the second must not be lost with it."""
    arm(layout, fault(name="a"), fault(name="b"))
    for name in ("a", "b"):
        with pytest.raises(RunFailedError, match=f"fault {name}"):
            point("trainer.recorded")
    point("trainer.recorded")


# -- errors of the filesystem ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["create", "write", "sync_file", "link", "sync_directory", "unlink"])
def test_no_space_at_each_operation(layout: RunLayout, operation: str) -> None:
    arm(layout, fault(point=f"{operation}:batches", action="enospc"))
    target = layout.batch(1)
    if operation == "unlink":  # a temporary file that cannot be removed is left to the next sweep
        publish_file(target, b"x")
        assert len(list(layout.batches.glob(".tmp-*"))) == 1
    else:
        with pytest.raises(StorageFullError, match=r"no space.*000001\.json"):
            publish_file(target, b"x")
        assert target.exists() == (operation == "sync_directory")
        assert not list(layout.batches.glob(".tmp-*"))
        publish_file(target, b"x")
    assert target.read_bytes() == b"x"
    assert fired(layout) is not None


def test_directories_and_hints_are_operations_too(layout: RunLayout) -> None:
    arm(
        layout,
        fault(name="mkdir", point="make_directory:weights", action="enospc"),
        fault(name="rmdir", point="remove_directory:checkpoints", action="eio"),
        fault(name="hint", point="replace:incarnations", action="eio"),
    )
    with pytest.raises(StorageFullError):
        make_directory(layout.weights_version(3))
    make_directory(layout.weights_version(3))
    make_directory(layout.checkpoint(1))
    remove_tree(layout.checkpoint(1))
    assert layout.checkpoint(1).exists()  # it costs space only
    with pytest.raises(StorageError):
        replace_hint(layout.liveness(1), b"x")
    assert all(fired(layout, name) for name in ("mkdir", "rmdir", "hint"))


def test_errors_come_as_often_as_asked_for(layout: RunLayout) -> None:
    arm(layout, fault(point="create:batches", action="eio", times=3, nth=2))
    publish_file(layout.batch(1), b"x")
    for _ in range(3):
        with pytest.raises(StorageError, match=r"000002\.json"):
            publish_file(layout.batch(2), b"x")
    publish_file(layout.batch(2), b"x")


def test_other_kinds_are_left_alone(layout: RunLayout) -> None:
    arm(layout, fault(point="link:weights", action="enospc"))
    publish_file(layout.batch(1), b"x")
    publish_file(layout.root / "run.json", b"x")
    assert fired(layout) is None


def test_files_of_a_run_behind_a_symbolic_link(layout: RunLayout, tmp_path: Path) -> None:
    """The controller spells the directory as the user gave it, the roles without links."""
    alias = RunLayout(tmp_path / "alias")
    alias.root.symlink_to(layout.root)
    arm(alias, fault(name="a", point="link:batches", action="eio"), fault(name="b", point="link:weights", action="eio"))
    for path in (alias.batch(1), layout.weights / "x"):
        with pytest.raises(StorageError):
            publish_file(path, b"x")


def test_the_run_directory_itself_is_a_kind(layout: RunLayout) -> None:
    arm(
        layout,
        fault(name="a", point="link:run", action="eio"),
        fault(name="b", point="sync_directory:run", action="eio"),
        fault(name="c", point="sync_directory:batches", action="eio"),
    )
    with pytest.raises(StorageError):
        publish_file(layout.run_record, b"x")
    with pytest.raises(StorageError):
        publish_file(layout.run_record, b"x")
    publish_file(layout.recipe, b"x")
    assert fired(layout, "b") and not fired(layout, "c")
    with pytest.raises(StorageError):
        publish_file(layout.batch(1), b"x")
    assert fired(layout, "c")


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "expected"), [("flip", b"ab\x73d"), ("truncate", b"ab")])
def test_damage_comes_after_the_commit(layout: RunLayout, action: str, expected: bytes) -> None:
    arm(layout, fault(point="link:batches", action=action, nth=2))
    publish_file(layout.batch(1), b"abcd")
    ref = publish_file(layout.batch(2), b"abcd")
    assert layout.batch(1).read_bytes() == b"abcd"
    assert layout.batch(2).read_bytes() == expected
    assert ref.bytes == 4  # the writer noticed nothing
    assert (fired(layout) or {})["path"].endswith("batches/000002.json")


def test_damage_changes_exactly_one_bit_and_bears_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    damage(path, "flip")
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    path.write_bytes(b"")
    damage(path, "flip")
    assert path.read_bytes() == b""


# -- what happens to processes --------------------------------------------------------------------------------------

SCRIPT = """
import sys, threading, time
from pathlib import Path
from milesbatch.faults.injector import arm_from
from milesbatch.faults.points import point
from milesbatch.store.layout import RunLayout
arm_from(Path(sys.argv[2]), "trainer-0", RunLayout(Path(sys.argv[1])))
print("armed", flush=True)
point("trainer.recorded")
print("went on", flush=True)
"""


def start(layout: RunLayout, script: str = SCRIPT, **fields: Any) -> subprocess.Popen[str]:
    plan = layout.root / "plan.yaml"
    plan.write_text(yaml.safe_dump({"faults": [fault(**fields).model_dump(mode="json")]}))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(layout.root), str(plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"action": "kill"}, -signal.SIGKILL), ({"action": "exit", "exit_code": 7}, 7), ({"action": "exit"}, 1)],
)
def test_the_process_ends(layout: RunLayout, fields: dict[str, Any], code: int) -> None:
    process = start(layout, **fields)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "armed\n")
    assert f"fault f: {fields['action']} at trainer.recorded" in err
    assert fired(layout) is not None
    again = start(layout, **fields)
    assert again.communicate(timeout=60)[0] == "armed\nwent on\n"
    assert again.returncode == 0


def test_the_process_is_delayed(layout: RunLayout) -> None:
    began_s = time.monotonic()
    out, _ = start(layout, action="delay", seconds=1.5).communicate(timeout=60)
    assert out == "armed\nwent on\n"
    assert time.monotonic() - began_s > 1.5


def test_the_process_stops_until_it_is_continued(layout: RunLayout) -> None:
    process = start(layout, action="stop")
    try:
        wait_for_state(process.pid, "T")
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "armed\nwent on\n"
    finally:
        process.kill()


def state_of(pid: int) -> str:
    """As the kernel spells it: T stopped, Z or nothing over."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for_state(pid: int, *states: str) -> None:
    deadline_s = time.monotonic() + 60
    while state_of(pid) not in states:
        assert time.monotonic() < deadline_s, f"process {pid} is {state_of(pid)}, not in one of the states {states}"
        time.sleep(0.02)


@pytest.mark.parametrize("action", ["stop", "outlive"])
def test_only_outlive_survives_the_parent(layout: RunLayout, action: str) -> None:
    """The parent starts the armed process with a parent-death signal, as a controller does, and is killed."""
    child = SCRIPT.replace(
        'print("armed"',
        'from milesbatch.cluster.local import die_with_parent; die_with_parent(int(sys.argv[3]))\nprint("armed"',
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, *sys.argv[1:], str(os.getpid())], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    process = start(layout, parent, action=action)
    try:
        deadline_s = time.monotonic() + 60
        while not (record := whole(fired_path(layout, "f"))):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        wait_for_state(record["pid"], "T")
        process.kill()
        process.wait()
        if action == "stop":
            wait_for_state(record["pid"], "Z", "X", "")
        else:
            time.sleep(0.3)
            assert state_of(record["pid"]) == "T"
            os.kill(record["pid"], signal.SIGCONT)
            assert "went on" in process.stdout.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.wait()


def test_connections_are_refused_for_a_while(layout: RunLayout) -> None:
    arm(layout, fault(point="wire.send", action="partition", seconds=0.3, nth=2))
    point("wire.send")
    began_s = time.monotonic()
    refused = 0
    while time.monotonic() - began_s < 5:
        try:
            point("wire.send")
            break
        except ConnectionRefusedError:
            refused += 1
            time.sleep(0.05)
    assert 2 <= refused <= 8
    assert time.monotonic() - began_s >= 0.3


def test_two_threads_at_one_point_fire_it_once(layout: RunLayout) -> None:
    """Work and heartbeats are two threads of a role; no passing may be lost between them."""
    import threading

    injector = arm(layout, fault(point="wire.send", nth=2000))
    caught: list[BaseException] = []

    def pass_often() -> None:
        for _ in range(1000):
            try:
                injector.at("wire.send")
            except RunFailedError as error:
                caught.append(error)

    threads = [threading.Thread(target=pass_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caught) == 1
