"""What the controller says about a death."""

from __future__ import annotations

import pytest

from milesbatch.cluster.last_words import last_error
from milesbatch.controller.supervise import describe_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit status 0"),
        (75, "exit status 75"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (-35, "killed by signal 35"),
        (-200, "killed by signal 200"),
    ],
)
def test_exit_status(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("", ""),
        ("\n \n", ""),
        ("loading\nerror: the disk is full\n", "the disk is full"),
        ("error: first\nmore\n", "first\nmore"),
        ("error: first\nnoise\nerror: second\n  what to do: wait\n", "second\n  what to do: wait"),
        ("no error: here\nValueError: bad\n", "ValueError: bad"),
        ('Traceback (most recent call last):\n  File "x"\nKeyError: 3\n\n', "KeyError: 3"),
        ("an error: in the middle", "an error: in the middle"),
        ("KeyError: 3\nsrun: error: n2: task 0: Exited with exit code 1\n", "KeyError: 3"),
        ("error: full\n  what to do: wait\nsrun: error: n2: task 0: Killed\n", "full\n  what to do: wait"),
        ("srun: error: n2: task 0: Killed\n", "srun: error: n2: task 0: Killed"),
    ],
)
def test_last_error(tail: str, said: str) -> None:
    assert last_error(tail) == said
