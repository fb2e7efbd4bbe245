"""The rank that was killed is the cause, not those that say that a peer went away."""

from __future__ import annotations

import pytest

from milesbatch.decisions.first_cause import first_cause, may_be_symptom, what_to_try
from milesbatch.errors import EXIT_NO_RESTART, EXIT_USAGE


def test_signals_come_first_then_refusals_then_errors() -> None:
    ended = {"trainer-0": 1, "trainer-1": EXIT_USAGE, "trainer-2": 75, "trainer-3": -9, "trainer-4": EXIT_NO_RESTART}
    assert first_cause(ended) == ["trainer-3", "trainer-1", "trainer-4", "trainer-0", "trainer-2"]
    assert first_cause({}) == []


@pytest.mark.parametrize(("code", "may_be"), [(1, True), (75, True), (0, False), (-9, False), (EXIT_USAGE, False)])
def test_only_an_error_of_its_own_may_be_a_symptom(code: int, may_be: bool) -> None:
    assert may_be_symptom(code) is may_be


@pytest.mark.parametrize(
    ("said", "helps"),
    [
        ("killed by SIGKILL, out of memory", "slurm.trainer.memory_gib"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gradient_checkpointing"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "memory_gib"),
        ("ModuleNotFoundError: No module named 'reasoning_gym'", "environment of the compute nodes"),
        ("no space or quota left for /run/weights", "make room"),
        ("killed by SIGBUS", "/dev/shm"),
        ("no heartbeat for 15 s", "slurm.hang_s"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "NCCL_DEBUG"),
    ],
)
def test_a_remedy_for_what_is_known(said: str, helps: str) -> None:
    assert helps in what_to_try("exit status 1", said)


def test_nothing_is_made_up() -> None:
    assert what_to_try("exit status 1", "ValueError: a user's own error about memory") == ""
