"""Verdicts on packages, this machine, and a Slurm's configuration."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from milesbatch.doctor import packages
from milesbatch.doctor.child import ChildAnswer, run_probe
from milesbatch.doctor.machine import gpu_checks, memory_check, shared_memory_check
from milesbatch.doctor.packages import Wanted, installed_versions, package_checks, parse_requirement
from milesbatch.doctor.scheduler import config_checks, parse_config, parse_partitions, partition_checks
from milesbatch.doctor.verdict import Check, Diagnosis, Level, bad, ok, unchecked
from milesbatch.recipe.site import Site

RECORDED = Path(__file__).parent / "recorded"


def levels(checks: list[Check]) -> dict[str, Level]:
    return {check.name: check.level for check in checks}


# -- values ---------------------------------------------------------------------------------------------------------------


def test_what_was_not_checked_is_not_good() -> None:
    diagnosis = Diagnosis((ok("a", "b", "c"), unchecked("slurm", "all", "no site")))
    assert diagnosis.is_fit and diagnosis.to_json()["not_checked"] == ["slurm: all"]
    assert not Diagnosis((bad("a", "b", "c", "d", "e"),)).is_fit
    for check in diagnosis.checks:
        assert Check.from_json(json.loads(json.dumps(check.to_json()))) == check


# -- packages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("pydantic<3,>=2.7", Wanted("pydantic", (("<", "3"), (">=", "2.7")), None)),
        ('torch<3,>=2.8; extra == "train"', Wanted("torch", (("<", "3"), (">=", "2.8")), "train")),
        ('pytest>=8; extra == "dev"', None),
        ("moto[server]>=5.0.22", Wanted("moto", ((">=", "5.0.22"),), None)),
        ("zstandard", Wanted("zstandard", (), None)),
    ],
)
def test_requirements(text: str, wanted: Wanted | None) -> None:
    assert parse_requirement(text) == wanted


@pytest.mark.parametrize(
    ("version", "fits"), [("2.13.0+cpu", True), ("2.8", True), ("2.8.0rc1", True), ("2.7.9", False), ("3.0", False)]
)
def test_versions(version: str, fits: bool) -> None:
    assert Wanted("torch", ((">=", "2.8"), ("<", "3")), None).fits(version) is fits


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["there>=1", "old>=2", "new<2,>=1", 'gone>=1; extra == "train"']
    found = {"there": "1.5", "old": "1.9", "new": "2.1", "milesbatch": "9"}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(packages.importlib.metadata, "version", version)
    checks = {check.name: check for check in package_checks()}
    assert checks["packages"].level is Level.BAD and "old is 1.9, wanted >=2" in checks["packages"].found
    assert (
        checks["packages for training"].level is Level.WARN
        and "gone is not installed" in checks["packages for training"].found
    )
    found["old"] = "2.0"
    assert levels(package_checks())["packages"] is Level.WARN, "newer than was tried"
    found["new"] = "1.0"
    assert levels(package_checks())["packages"] is Level.OK
    assert installed_versions()["there"] == "1.5" and "gone" not in installed_versions()


# -- machine --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "level"), [("max", Level.OK), (str(8 << 30), Level.OK), (str(1 << 30), Level.WARN)])
def test_memory(tmp_path: Path, limit: str, level: Level) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       32000000 kB\nMemAvailable:   16000000 kB\nHugePages_Total:   0\n"
    )
    (tmp_path / "limit").write_text(limit)
    found = memory_check(tmp_path / "meminfo", tmp_path / "limit")
    assert found.level is level and ("limited" in found.found) == (limit != "max")
    assert memory_check(tmp_path / "none").level is Level.UNCHECKED


def test_shared_memory(tmp_path: Path) -> None:
    assert shared_memory_check(tmp_path / "none").level is Level.UNCHECKED
    assert shared_memory_check(tmp_path).level in (Level.OK, Level.WARN)


def device(**changes: Any) -> dict[str, Any]:
    return {"name": "H100", "memory_bytes": 80 << 30, "error": None, **changes}


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        (ChildAnswer(None, "it did not end within 90 s"), Level.BAD),
        (ChildAnswer({"torch": None, "error": "no module"}), Level.WARN),
        (ChildAnswer({"torch": "2.9", "cuda": None, "nccl": None, "devices": []}), Level.OK),
        (ChildAnswer({"torch": "2.9", "cuda": "12", "nccl": "2", "devices": [device()]}), Level.OK),
        (ChildAnswer({"torch": "2.9", "cuda": "12", "nccl": "2", "devices": [device(error="Xid 79")]}), Level.BAD),
    ],
)
def test_gpus(answer: ChildAnswer, level: Level) -> None:
    assert [check.level for check in gpu_checks(answer)] == [level]


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from milesbatch.doctor import child

    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho starting\nsleep 60 & sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(script))
    assert "did not end within 0 s" in run_probe("gpus", timeout_s=0.3).error
    script.write_text("#!/bin/sh\necho 'noise'\necho '{\"a\": 1}'\n")
    assert run_probe("gpus").body == {"a": 1}
    script.write_text("#!/bin/sh\necho words\necho 'ImportError: x' >&2\nexit 3\n")
    assert run_probe("gpus") == ChildAnswer(None, "ImportError: x")
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    assert run_probe("gpus").error == "exit status -9"


# -- Slurm's configuration ------------------------------------------------------------------------------------------------


@pytest.fixture
def config() -> dict[str, str]:
    """Of the development cluster, as Slurm 22.05 prints it."""
    return parse_config((RECORDED / "show-config.txt").read_text())


def site(**changes: Any) -> Site:
    return Site.model_validate(
        {"name": "here", "trainer": {"partition": "trainer"}, "rollout": {"partition": "rollout"}, **changes}
    )


def test_the_development_cluster_is_well(config: dict[str, str]) -> None:
    assert config["SLURM_VERSION"] == "22.05.8" and config["RequeueExit"] == "" and config["SlurmctldHost[0]"]
    assert set(levels(config_checks(config, site())).values()) == {Level.OK}


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"SLURM_VERSION": "20.11.9"}, "version", Level.WARN),
        ({"SLURM_VERSION": "26.05.0"}, "version", Level.WARN),
        ({"SLURM_VERSION": "24.11.1-custom"}, "version", Level.OK),
        ({"SchedulerParameters": "bf_interval=60"}, "starting heterogeneous jobs", Level.WARN),
        ({"SchedulerType": "sched/builtin"}, "starting heterogeneous jobs", Level.BAD),
        ({"RequeueExit": "70-80"}, "exit codes", Level.BAD),
        ({"RequeueExitHold": "1"}, "exit codes", Level.BAD),
        ({"RequeueExit": "42,99"}, "exit codes", Level.OK),
        ({"SlurmctldParameters": ""}, "preemption", Level.WARN),
        ({"SlurmctldParameters": "", "PreemptParameters": "send_user_signal"}, "preemption", Level.OK),
        ({"SlurmctldParameters": "", "PreemptType": "preempt/none"}, "preemption", Level.OK),
        ({"SlurmdTimeout": "300 sec"}, "node loss", Level.WARN),
        ({"SlurmdTimeout": "0 sec"}, "node loss", Level.WARN),
        ({"KillWait": "2 sec"}, "ending", Level.WARN),
        ({"MinJobAge": "10 sec"}, "memory of jobs", Level.WARN),
        ({"SelectType": "select/linear"}, "selection", Level.WARN),
        ({"JobRequeue": "0"}, "requeue", Level.OK),
    ],
)
def test_settings_that_matter(config: dict[str, str], change: dict[str, str], name: str, level: Level) -> None:
    found = levels(config_checks({**config, **change}, site()))
    assert {name for name, other in found.items() if other is not Level.OK} == (
        {name} if level is not Level.OK else set()
    )
    assert found[name] is level


def test_sites_without_heterogeneous_jobs_need_no_backfill(config: dict[str, str]) -> None:
    found = config_checks({**config, "SchedulerType": "sched/builtin"}, site(shapes=["single"]))
    assert levels(found)["starting heterogeneous jobs"] is Level.OK


def test_a_configuration_that_says_nothing() -> None:
    assert {check.level for check in config_checks({}, site(shapes=["single"]))} <= {Level.OK, Level.WARN}


@pytest.fixture
def partitions() -> dict[str, dict[str, str]]:
    return parse_partitions((RECORDED / "show-partition.txt").read_text())


def test_partitions_of_the_development_cluster(partitions: dict[str, dict[str, str]]) -> None:
    assert set(partitions) == {"trainer", "rollout", "rollout_cancel", "high"}
    assert {check.level for check in partition_checks(partitions, site())} == {Level.OK}


@pytest.mark.parametrize(
    ("changes", "state", "level", "words"),
    [
        ({"rollout": {"partition": "nosuch"}}, {}, Level.BAD, "high, rollout, rollout_cancel, trainer"),
        ({}, {"State": "DRAIN"}, Level.BAD, "ask the site's support"),
        ({"max_time_minutes": 600}, {"MaxTime": "05:00:00"}, Level.BAD, "set max_time_minutes: 300"),
        ({"max_time_minutes": 300}, {"MaxTime": "05:00:00"}, Level.OK, ""),
        ({"max_time_minutes": 90000}, {"MaxTime": "UNLIMITED"}, Level.OK, ""),
        ({"trainer": {"partition": "rollout"}, "rollout": {"partition": "high"}}, {}, Level.WARN, "not preempted"),
        ({"rollout": {"partition": "rollout,high"}}, {}, Level.OK, ""),
    ],
)
def test_partitions_that_do_not_fit(
    partitions: dict[str, dict[str, str]], changes: dict[str, Any], state: dict[str, str], level: Level, words: str
) -> None:
    partitions["rollout"] |= state
    checks = partition_checks(partitions, site(**changes))
    worst = [check for check in checks if check.level is level]
    assert worst and any(words in check.mend + check.meaning for check in worst)
    assert all(check.level in (level, Level.OK) for check in checks)


def test_the_default_partition(partitions: dict[str, dict[str, str]]) -> None:
    nothing_said = Site(name="here")
    assert [check.name for check in partition_checks(partitions, nothing_said)] == [
        "trainer partition trainer",
        "rollout partition trainer",
    ]
    for fields in partitions.values():
        fields["Default"] = "NO"
    assert {check.level for check in partition_checks(partitions, nothing_said)} == {Level.BAD}
