"""The command line of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milesbatch.engines.sglang.settings import ServerSettings


def settings(**options: Any) -> ServerSettings:
    given = {"device": "cuda", "dtype": "bfloat16", "max_length": 100, "max_running": 8}
    return ServerSettings(Path("/env/bin/python"), Path("/run/model"), **{**given, **options})


def test_on_gpus() -> None:
    made = settings(tensor_parallel=2, first_device=4, memory_fraction=0.8, arguments=("--attention-backend=fa3",))
    words = made.command(1234, Path("/m/key.yaml"))
    assert words[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    assert {"--tp=2", "--base-gpu-id=4", "--mem-fraction-static=0.8", "--port=1234", "--dtype=bfloat16"} <= set(words)
    assert words[-1] == "--attention-backend=fa3", "a site's own flags win"
    assert not any(word.startswith("--device") for word in words)
    assert "SGLANG_USE_CPU_ENGINE" not in made.environment()


def test_on_the_cpu() -> None:
    made = settings(device="cpu", tensor_parallel=2, max_total_tokens=512)
    assert {"--device=cpu", "--disable-cuda-graph", "--max-total-tokens=512"} <= set(made.command(1, Path("/k")))
    assert made.environment()["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_the_whole_context_can_be_used_and_the_key_is_on_no_command_line() -> None:
    words = settings().command(1, Path("/m/key.yaml"))
    (context,) = (int(word.partition("=")[2]) for word in words if word.startswith("--context-length"))
    assert context >= 100 + 8
    assert words[words.index("--config") + 1] == "/m/key.yaml"
    assert not any("api-key" in word for word in words)
