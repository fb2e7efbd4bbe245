"""Copies of the weights on a host: none is left for ever, none is taken from a living process, and room for them is seen to."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from milesbatch.errors import (
    EXIT_NO_RESTART,
    EXIT_USAGE,
    InputError,
    LocalSpaceError,
    StorageFullError,
    StorageReadOnlyError,
)
from milesbatch.rollout import memory as module
from milesbatch.rollout.memory import LocalMemory, Room
from milesbatch.rollout.servers import Owner, copy_bytes, memory_of
from milesbatch.store.operations import Operations, installed
from milesbatch.store.patience import AT_ONCE, Patience

NOW = Room(AT_ONCE)

WORKER = """
import sys, time
from pathlib import Path
from milesbatch.rollout.memory import LocalMemory
memory = LocalMemory.take(Path(sys.argv[1]), "run", sys.argv[2], sys.argv[3])
(memory.directory / "staged").mkdir(exist_ok=True)
(memory.directory / "staged" / "model.safetensors").write_bytes(bytes(1000))
print("there", flush=True)
time.sleep(600)
"""


def start(base: Path, owner: str, life: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WORKER, str(base), owner, life]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "there\n"
    return worker


def kill(*workers: subprocess.Popen[str]) -> None:
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
        worker.wait()


def names(base: Path) -> list[str]:
    return sorted(entry.name for entry in base.iterdir())


@pytest.mark.parametrize("life", ["", ".i2.0"])
def test_what_killed_processes_of_the_run_left_goes_and_what_lives_stays(tmp_path: Path, life: str) -> None:
    """Whatever their names and lives were: an evaluator by hand never comes again under the same one."""
    base = tmp_path / "memory"
    living = [start(base, "rollout-1", ".i1.1"), start(base, "evaluation-node7-4712", "")]
    kill(start(base, "rollout-1", ".i1.0"), start(base, "rollout-0", ""), start(base, "evaluation-node7-4711", ""))
    for other in ("another.rollout-1.i1.0", "run2.rollout-1", "run"):
        (base / other).mkdir()
    kept = {
        "run.rollout-1.i1.1", "run.evaluation-node7-4712", "another.rollout-1.i1.0", "run2.rollout-1", "run",
    }  # fmt: skip
    assert set(names(base)) == kept | {"run.rollout-1.i1.0", "run.rollout-0", "run.evaluation-node7-4711"}
    memory = LocalMemory.take(base, "run", "rollout-1", life)
    assert set(names(base)) == kept | {f"run.rollout-1{life}"}
    assert (base / "run.rollout-1.i1.1" / "staged" / "model.safetensors").exists()
    kill(*living)
    memory.close()
    assert not memory.directory.exists()
    LocalMemory.take(base, "run", "rollout-1", ".i2.1").close()
    assert names(base) == ["another.rollout-1.i1.0", "run", "run2.rollout-1"]


def test_what_was_left_under_the_same_name_is_used_again(tmp_path: Path) -> None:
    """Of servers that outlive a worker: the next start patches what is there."""
    kill(start(tmp_path, "rollout-1", ""))
    memory = LocalMemory.take(tmp_path, "run", "rollout-1", "")
    assert (memory.directory / "staged" / "model.safetensors").exists()
    memory.close()


def test_where_locks_of_other_hosts_may_not_be_seen_only_earlier_lives_of_the_owner_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_local", lambda path: False)
    for left in ("run.rollout-1.i1.0", "run.rollout-0.i1.0", "run.rollout-10.i1.0"):
        (tmp_path / left).mkdir()
    LocalMemory.take(tmp_path, "run", "rollout-1", ".i2.0").close()
    assert names(tmp_path) == ["run.rollout-0.i1.0", "run.rollout-10.i1.0"]


def test_a_directory_that_its_owner_made_again_meanwhile_is_not_taken_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "run.rollout-0"
    left.mkdir()
    real = module.fcntl.flock
    owner: list[subprocess.Popen[str]] = []

    def flock(descriptor: int, how: int) -> None:
        if how & module.fcntl.LOCK_EX and not owner:  # another start was quicker, and the owner came back since
            left.rmdir()
            owner.append(start(tmp_path, "rollout-0", ""))
        real(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", flock)
    LocalMemory.take(tmp_path, "run", "rollout-1", ".i2.0").close()
    assert (left / "staged" / "model.safetensors").exists()
    kill(*owner)


def test_of_a_link_nothing_is_removed_that_it_leads_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    base = tmp_path / "memory"
    base.mkdir()
    (base / "run.rollout-1.i1.0").symlink_to(kept)
    LocalMemory.take(base, "run", "rollout-1", ".i2.0").close()
    assert (kept / "file").read_text() == "mine"


def test_lives_that_share_one_directory_find_it_again(tmp_path: Path) -> None:
    first = LocalMemory.take(tmp_path, "run", "rollout-1", "")
    second = LocalMemory.take(tmp_path, "run", "rollout-1", "")
    assert first.directory == second.directory
    second.close()
    first.close()


def test_nobody_else_may_look(tmp_path: Path) -> None:
    base = tmp_path / "memory"
    LocalMemory.take(base, "run", "rollout-1", ".i1.0").close()
    assert base.stat().st_mode & 0o777 == 0o700


def of_run(memory_dir: str) -> Any:
    sglang = SimpleNamespace(memory_dir=memory_dir)
    recipe = SimpleNamespace(rollout=SimpleNamespace(sglang=sglang))
    return SimpleNamespace(recipe=recipe, record=SimpleNamespace(run_id="run"))


OWNER = Owner("rollout-0", 1, ".i1.0", "127.0.0.1", 0, 1, ())


@pytest.mark.parametrize("kind", ["device", "file", "below a file", "dangling"])
def test_a_memory_dir_that_is_no_directory_is_the_users_error_and_final(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/null"), "below a file": tmp_path / "file" / "deeper"}.get(kind, tmp_path / "file")
    if kind == "dangling":
        path.symlink_to(tmp_path / "nothing")
    elif kind != "device":
        (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"rollout.sglang.memory_dir: .* is not a directory") as caught:
        memory_of(of_run(str(path)), OWNER, NOW, 0)
    assert caught.value.exit_code == EXIT_USAGE and "broadcast" in caught.value.mend


def test_one_that_belongs_to_somebody_else_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(InputError, match=r"rollout.sglang.memory_dir: .* belongs to somebody else"):
        memory_of(of_run(str(tmp_path)), OWNER, NOW, 0)


def test_one_that_must_not_be_written_is_the_users_error(tmp_path: Path) -> None:
    class Forbidden(Operations):
        def make_directory(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with installed(Forbidden()), pytest.raises(InputError, match=r"memory_dir: cannot use .*: Permission denied"):
        memory_of(of_run(str(tmp_path)), OWNER, NOW, 0)


class Filesystem:
    """What ``statvfs`` says."""

    def __init__(self, total: int, free: int) -> None:
        self.total, self.free = total, free

    def __call__(self, path: object) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=self.total // 4096, f_bavail=self.free // 4096, f_frsize=4096)


def test_a_filesystem_that_is_smaller_than_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", Filesystem(524_288, 409_600))
    with pytest.raises(InputError) as caught:
        memory_of(of_run(str(tmp_path)), OWNER, NOW, 1_602_560)
    assert all(word in caught.value.what for word in ("memory_dir", "1,602,560", "524,288", "409,600"))
    assert names(tmp_path / f"milesbatch-{os.getuid()}") == []
    memory_of(of_run(str(tmp_path)), OWNER, NOW, 0).close()  # by broadcast it needs none


def test_a_filesystem_without_a_limit_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", Filesystem(0, 0))
    memory_of(of_run(str(tmp_path)), OWNER, NOW, 1_602_560).close()


def test_space_that_others_have_taken_is_waited_for_and_then_this_start_alone_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Filesystem(8 << 20, 1 << 20)
    monkeypatch.setattr(os, "statvfs", disk)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        disk.free = 4 << 20

    with pytest.raises(LocalSpaceError) as caught:
        memory_of(of_run(str(tmp_path)), OWNER, NOW, 2 << 20)
    error = caught.value
    assert error.may_restart and error.exit_code not in (EXIT_USAGE, EXIT_NO_RESTART)
    assert not isinstance(error, StorageFullError), "which ends a run"
    assert all(word in error.what for word in ("rollout.sglang.memory_dir", "2,097,152", "1,048,576 of 8,388,608"))
    memory_of(of_run(str(tmp_path)), OWNER, Room(Patience(30, tell)), 2 << 20).close()
    assert len(told) == 1 and told[0].startswith("rollout.sglang.memory_dir: no space left for ")


def test_a_copy_that_is_there_already_counts_as_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner("rollout-0", 1, "", "127.0.0.1", 0, 1, ("http://node7:30000",))
    memory = memory_of(of_run(str(tmp_path)), owner, NOW, 0)
    (memory.directory / "model.safetensors").write_bytes(os.urandom(3 << 20))
    os.sync()
    monkeypatch.setattr(os, "statvfs", Filesystem(8 << 20, 0))
    memory_of(of_run(str(tmp_path)), owner, NOW, 2 << 20).close()
    memory.close()


def test_an_error_of_closing_is_told_and_does_not_hide_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cannot(path: Path) -> None:
        raise StorageReadOnlyError(f"cannot write {path}: Read-only file system")

    memory = LocalMemory.take(tmp_path, "run", "rollout-1", "")
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="the first"):
        patch.setattr(module, "remove_tree", cannot)
        try:
            raise KeyError("the first")
        finally:
            memory.close()
    assert f"{memory.directory} stays: cannot write" in capsys.readouterr().err
    LocalMemory.take(tmp_path, "run", "rollout-0", "").close()
    assert names(tmp_path) == [], "its lock was let go"


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_size_of_a_copy_is_that_of_the_model_in_the_dtype_of_versions(tmp_path: Path, is_tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=is_tied,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert (copy_bytes(tmp_path, "float32"), copy_bytes(tmp_path, "bfloat16")) == (4 * elements, 2 * elements)
    assert torch.get_default_dtype() == torch.float32
