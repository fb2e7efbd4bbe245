"""The recipe section for SGLang as the rollout engine. Imports without torch.

The page behind it is ``docs/sglang.md``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from milesbatch.recipe.inputs import Section

TESTED = "0.5.23"
"""The version of SGLang that this is written against and tested with."""
_TAKEN = {
    "--host": "the worker sets it itself",
    "--port": "the worker sets it itself",
    "--model-path": "the worker sets it itself",
    "--model": "the worker sets it itself",
    "--load-format": "the worker sets it itself",
    "--api-key": "the worker sets it itself",
    "--config": "the worker gives a file of its own",
    "--dtype": "it follows from weights.dtype",
    "--tp": "set rollout.sglang.tensor_parallel",
    "--tp-size": "set rollout.sglang.tensor_parallel",
    "--tensor-parallel-size": "set rollout.sglang.tensor_parallel",
    "--device": "set rollout.sglang.device",
    "--base-gpu-id": "the worker sets it itself",
    "--nnodes": "start a server over several nodes yourself, and name it in rollout.sglang.urls",
    "--node-rank": "start a server over several nodes yourself, and name it in rollout.sglang.urls",
    "--help": "no server starts with it",
    "--version": "no server starts with it",
}
"""Flags that `rollout.sglang.arguments` may not have, and why."""

_PORTS = {"http": 80, "https": 443}
_WEEK_S = 604800.0
"""Longer than any allocation: a time limit above it is a slip of the hand."""
_MOST_ON_A_NODE = 64
"""More GPUs than any node has."""


class SGLang(Section):
    """The SGLang servers of one rollout worker; used with `rollout.engine: sglang`."""

    python: str = Field(
        ".venv-sglang/bin/python",
        min_length=1,
        description="Python of the environment in which SGLang is installed, which is not that of milesbatch; a relative path"
        " begins where the command is given, a name without a slash is looked for on the PATH."
        " `make sglang-cpu` makes one for machines without a GPU.",
    )
    device: Literal["cuda", "cpu"] = Field(
        "cuda", description="What the servers compute on; `cpu` is for tests and tiny models."
    )
    servers: int = Field(
        1,
        ge=1,
        le=_MOST_ON_A_NODE,
        description="Servers of each worker, on its own GPUs: it needs this times `tensor_parallel` of them. Requests with the"
        " same prompt go to the same server.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=_MOST_ON_A_NODE,
        description="GPUs that one server splits the model over, on one node. Too few and the model does not fit; more than"
        " needed generate less than as many servers of their own.",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of a GPU's memory for weights and key-value cache; null leaves it to SGLang. Too large runs out of"
        " memory while generating.",
    )
    max_total_tokens: int | None = Field(
        None,
        ge=64,
        description="Tokens that a server's key-value cache holds; null leaves it to SGLang, which takes all the memory that"
        " is left. When it is full, requests are put back and computed again.",
    )
    pause: Literal["retract", "in_place", "abort"] = Field(
        "retract",
        description="What becomes of running samples while weights change: `retract` computes their key-value cache again under"
        " the new ones, `in_place` keeps what the old ones made and is the fastest, `abort` cuts them and asks again for the"
        " rest, for servers that know neither.",
    )
    routed_experts: bool = Field(
        False,
        description="Of mixture-of-experts models: record for each token which experts it went through (`routed_experts` in"
        " trajectory files). Two bytes for each layer and expert of a token: files and answers get many times as large, so it"
        " is off unless somebody wants it. An error with dense models.",
    )
    memory_dir: str | None = Field(
        None,
        description="A directory on each rollout node for a copy of the model in the dtype of the weights: tmpfs or a local"
        " disk, with room for it. Null takes /dev/shm, or the directory for temporary files.",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        le=_WEEK_S,
        description="Seconds within which a server must generate after its start; it is then started again, twice, and after"
        " that the worker fails with the server's last words.",
    )
    health_timeout_s: float = Field(
        60.0,
        gt=0,
        le=_WEEK_S,
        description="Seconds after which a server that generates nothing, though asked to, is killed and started again. Shorter"
        " than its longest prefill takes, healthy servers are ended.",
    )
    request_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=_WEEK_S,
        description="Seconds that one answer may take. Shorter than the longest response takes, it is asked for again and"
        " again, and in the end the worker fails.",
    )
    update_timeout_s: float = Field(
        600.0,
        gt=0,
        le=_WEEK_S,
        description="Seconds that a server may take for new weights, from its pause to their proof; after that it is killed and"
        " started again. A server that gets 1 GB in a second from the local disk or its worker takes 300 GB in half of this;"
        " shorter than the change takes, no version is ever served.",
    )
    arguments: tuple[str, ...] = Field(
        (),
        description="Further flags of `sglang.launch_server`, such as `--attention-backend=fa3`, one word each; they win over"
        " those that follow from the recipe. What the worker must know of is refused, abbreviated too: addresses, model, dtype,"
        " key, device, parallelism.",
    )
    urls: tuple[str, ...] = Field(
        (),
        description="Servers that somebody else runs, such as `http://node7:30000`, instead of starting some: they are shared"
        " out among the workers, at least one each, must see `memory_dir` (or use `weights.transport: broadcast`), and take"
        " their weights from this run alone.",
    )

    routers: tuple[str, ...] = Field(
        (),
        description="Routers (`sglang-router`) that somebody has put in front of `urls`, such as `http://node7:8000`, one for"
        " each worker: the first worker's has the first of `urls` behind it and every `workers`-th after that, and so on."
        " Requests go through them; weights, pauses and aborts go to each server. Without any, workers choose among their"
        " servers themselves.",
    )
    key_file: str | None = Field(
        None,
        description="Where the servers of `urls` want a key (SGLang's `--api-key`): a file that holds it, the same path on each"
        " rollout node, unreadable for others. The key itself is never written into the run. Null sends none.",
    )

    @field_validator("memory_dir", "key_file")
    @classmethod
    def _is_a_place(cls, path: str | None) -> str | None:
        if path is not None and not (path.startswith("/") and path.isprintable()):
            raise ValueError(f"{path!r} is no absolute path; `~` and variables are not filled in")
        if path is not None and "$" in path:
            raise ValueError(f"{path!r} has a variable in it, which nothing fills in")
        return path

    @field_validator("urls", "routers")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return server_addresses(urls)

    @field_validator("arguments")
    @classmethod
    def _are_free_flags(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        may_be_value = False
        for word in arguments:
            name, equals, _ = word.partition("=")
            if name.startswith("--") and len(name) > 2:
                _check_free(word, name)
                may_be_value = not equals
            elif not may_be_value or not word or (word.startswith("-") and not word[1:2].isdigit()):
                raise ValueError(
                    f"{word!r} is no flag of the form --name or --name=value, and belongs to none before it"
                )
        return arguments


def _check_free(word: str, name: str) -> None:
    """A flag that is free to choose. SGLang takes any beginning of a flag's name for it.

    Raises:
        ValueError: it is not, or is more than one word.
    """
    begin = name.split()[0].replace("_", "-")
    for taken, why in _TAKEN.items():
        if taken.startswith(begin):
            meant = taken if taken == begin else f"{taken}, of which it is the beginning"
            raise ValueError(f"{word!r} sets {meant}: not in arguments, {why}")
    if name.split() != [name]:
        raise ValueError(f"{word!r} is more than one word: write {begin}=value")


def python_of_servers(python: str) -> Path:
    """Where `rollout.sglang.python` is, absolute; a path that may not be there. A name alone is looked for on the PATH."""
    found = None if "/" in python else shutil.which(python)
    return Path(found or python).absolute()


def server_addresses(urls: tuple[str, ...]) -> tuple[str, ...]:
    """``urls`` in the form in which servers are asked: one spelling of each.

    Raises:
        ValueError: one is no address of a server, or is there twice.
    """
    found = tuple(_address(url) for url in urls)
    twice = sorted({url for url in found if found.count(url) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is there twice: a server follows one worker")
    return found


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # a port out of range, or brackets that do not match
        raise ValueError(f"{url!r} is not the address of a server such as http://node7:30000: {error}") from error
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(' ?#@\\"<>')
    if parts.scheme not in _PORTS or not host or port == 0 or parts.path.strip("/") or not is_plain:
        raise ValueError(
            f"{url!r} is not the address of a server such as http://node7:30000: a scheme, a host and a port, and nothing else"
        )
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + ("" if port in (None, _PORTS[parts.scheme]) else f":{port}")
