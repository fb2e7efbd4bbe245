import sys
import textwrap
from pathlib import Path

import pytest

from milesbatch.environments.judge import Judge, load_reward, reward_fingerprint
from milesbatch.environments.prompts import Message, Prompt
from milesbatch.errors import ExtensionError

PROMPT = Prompt("p-7", (Message("user", "1+1="),), "2")
SOURCE = """
import asyncio, math
from decimal import Decimal
import numpy

NOT_A_FUNCTION = 3
BUSY = []
def right(prompt, response): return response == prompt.answer
def raises(prompt, response): return {}["missing"]
def nan(prompt, response): return math.nan
def text(prompt, response): return "1.0"
def nothing(prompt, response): pass
def array(prompt, response): return numpy.zeros(2)
def scalar(prompt, response): return numpy.float32(0.5)
def parts(prompt, response): return {"format": 0.25, "answer": 1}
def total(prompt, response): return {"format": 0.25, "reward": 3}
def bad_part(prompt, response): return {"format": math.inf}
def empty(prompt, response): return {}
def one_parameter(prompt): return 1.0
def bad_text(prompt, response): raise Exception("all wrong")
async def slow(prompt, response):
    BUSY.append(1)
    while len(BUSY) < int(response): await asyncio.sleep(0)
    return {"waited": 1.0}
async def slow_error(prompt, response): raise OSError("server gone")
def leaves(prompt, response): raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_rewards", "broken_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "my_rewards.py"


def line_of(text: str) -> int:
    return 1 + next(i for i, line in enumerate(SOURCE.split("\n")) if text in line)


def judged(name: str, response: str = "2"):
    return Judge(f"my_rewards:{name}").judge(PROMPT, response)


def test_numbers_and_parts():
    assert judged("right").reward == 1.0
    assert judged("right", "3").reward == 0.0
    assert judged("scalar").reward == 0.5
    assert (judged("parts").reward, judged("parts").parts) == (1.25, {"format": 0.25, "answer": 1.0})
    assert (judged("total").reward, judged("total").parts) == (3.0, {"format": 0.25})
    assert judged("parts").error is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "KeyError: 'missing'"),
        ("bad_text", "Exception: all wrong"),
        ("nan", "the result is nan"),
        ("text", "'1.0', a str"),
        ("nothing", "None, a NoneType"),
        ("array", "cannot be read as one number"),
        ("bad_part", "part 'format' is inf"),
        ("empty", "empty mapping"),
        ("slow_error", "OSError: server gone"),
    ],
)
def test_what_goes_wrong_is_told_with_function_prompt_and_line(module, name, says):
    result = judged(name)
    assert result.reward == 0.0
    assert result.error is not None
    assert "my_rewards:" + name in result.error
    assert "p-7" in result.error
    assert says in result.error
    assert f"{module}:{line_of('def ' + name + '(')}" in result.error


def test_async_rewards_run_together_and_one_failure_stays_alone():
    cases = [(PROMPT, "3")] * 3
    assert [result.reward for result in Judge("my_rewards:slow").judge_all(cases)] == [1.0, 1.0, 1.0]
    mixed = Judge("my_rewards:slow").judge_all([(PROMPT, "1"), (PROMPT, "no number"), (PROMPT, "1")])
    assert [result.error is None for result in mixed] == [True, False, True]
    assert "ValueError" in str(mixed[1].error)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("my_rewards", "package.module:name"),
        (":name", "package.module:name"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("my_rewards:rihgt", "has no 'rihgt'"),
        ("my_rewards:NOT_A_FUNCTION", "is a int, not a function"),
        ("my_rewards:one_parameter", "other parameters"),
        ("broken_rewards:f", "broken_rewards.py:2"),
    ],
)
def test_a_function_that_cannot_be_loaded(spec, says):
    with pytest.raises(ExtensionError) as caught:
        load_reward(spec)
    assert says in str(caught.value)
    assert repr(spec) in str(caught.value)


def test_the_fingerprint_follows_the_functions_own_source(module, monkeypatch):
    before = reward_fingerprint("my_rewards:parts"), reward_fingerprint("my_rewards:right")
    module.write_text(textwrap.dedent(SOURCE).replace("0.25", "0.75"))
    monkeypatch.delitem(sys.modules, "my_rewards")
    import linecache

    linecache.checkcache()
    assert reward_fingerprint("my_rewards:parts") != before[0]
    assert reward_fingerprint("my_rewards:right") == before[1]


def test_shipped_rewards_load():
    for name in ("exact_match", "last_number", "digit_match", "gym_score"):
        load_reward(f"milesbatch.environments.rewards:{name}")


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit(0)",
        "import asyncio; raise asyncio.CancelledError",
        "raise ValueError('bad \\ud800')",
        "raise ValueError('x' * 3_000_000)",
    ],
    ids=["exit", "cancelled", "surrogate", "long"],
)
def test_nothing_of_the_users_ends_the_worker_or_spoils_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "wild.py").write_text(
        f"def score(prompt, response):\n    {body}\n\nasync def later(prompt, response):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wild", raising=False)
    for name in ("score", "later"):
        (judgement,) = Judge(f"wild:{name}").judge_all([(Prompt("p", (Message("user", "1"),), "1"), "1")])
        assert judgement.error is not None
        assert len(judgement.error.encode()) < 10_000


def test_names_of_parts_can_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named.py").write_text("def score(prompt, response):\n    return {'\\ud800': 1.0}\n")
    monkeypatch.syspath_prepend(tmp_path)
    judgement = Judge("named:score").judge(Prompt("p", (Message("user", "1"),), "1"), "1")
    assert [name.encode() for name in judgement.parts] == [b"\\ud800"]
