"""Stands in for SGLang's compiled kernels, which exist for GPUs only. It can be imported; nothing in it can be called.

SGLang imports names of it at start, also where it takes torch's own operations. A name that is called after all says so.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def not_here(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a GPU kernel; this environment runs SGLang on the CPU")

    return not_here
