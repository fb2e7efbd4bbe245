"""What one server is started with: its command line and environment. Pure; no processes.

Invariant: what must mean the same in every engine (context, dtype, how many sequences at a time) follows from the run;
what only a site can know (further flags) comes last, so that it wins. The flags are those of SGLang 0.5.23
(``docs/sglang.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
)
CONTEXT_MARGIN = 16
"""SGLang takes prompts that are a few tokens shorter than its context; so it is told of a longer one."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to start one server; ``model`` is a directory with configuration and tokenizer, weights come later."""

    python: Path
    model: Path
    device: str
    """``cuda`` or ``cpu``."""
    dtype: str
    max_length: int
    """Tokens of prompt and response together."""
    max_running: int
    tensor_parallel: int = 1
    first_device: int = 0
    memory_fraction: float | None = None
    max_total_tokens: int | None = None
    seed: int = 0
    routed_experts: bool = False
    """It can tell which experts tokens went through."""
    arguments: Sequence[str] = ()

    def command(self, port: int, secrets: Path) -> list[str]:
        """The command line; ``secrets`` is SGLang's configuration file with the key that every request must show."""
        words = [
            str(self.python),
            "-m",
            "sglang.launch_server",
            "--config",  # as a word of its own: else SGLang does not read the file
            str(secrets),
            f"--model-path={self.model}",
            "--host=127.0.0.1",
            f"--port={port}",
            "--load-format=dummy",
            f"--dtype={self.dtype}",
            f"--context-length={self.max_length + CONTEXT_MARGIN}",
            f"--max-running-requests={self.max_running}",
            f"--tp={self.tensor_parallel}",
            f"--random-seed={self.seed}",
            "--sleep-on-idle",
            "--log-level-http=warning",  # else each request is a line, in a log without an end
        ]
        if self.memory_fraction is not None:
            words.append(f"--mem-fraction-static={self.memory_fraction}")
        if self.max_total_tokens is not None:
            words.append(f"--max-total-tokens={self.max_total_tokens}")
        if self.routed_experts:
            words.append("--enable-return-routed-experts")
        if self.device == "cpu":
            words += _CPU_FLAGS
        elif self.first_device:
            words.append(f"--base-gpu-id={self.first_device}")
        return [*words, *self.arguments]

    def environment(self) -> dict[str, str]:
        """Variables beside those of the worker."""
        extra = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if self.device == "cpu":
            extra["SGLANG_USE_CPU_ENGINE"] = "1"
            if self.tensor_parallel > 1:  # else SGLang wants a NUMA node for each of them
                extra["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(self.tensor_parallel))
        return extra
