"""What SGLang needs in order to start beside a torch without CUDA. Imported by every process of its environment (the
.pth file).

torchvision's wheels are built for CUDA: their library does not load here, and the import then fails because the
operators that it would have brought have no schema. Declaring the two that are looked up is enough; nobody calls them.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class DeclareOperators:
    """Looks on when torchvision is about to be imported; finds nothing itself."""

    library: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision" and DeclareOperators.library is None:
            import torch

            if torch.version.cuda is None:
                DeclareOperators.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    DeclareOperators.library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


def register() -> None:
    """SGLang's plugin hook: host memory for routed experts is plain memory, where SGLang would register it with
    CUDA."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if torch.version.cuda is None:
        HookRegistry.register(
            "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register", plain_memory, HookType.REPLACE
        )


def plain_memory(dims: Any, dtype: Any, device: str, pin_memory: bool, *more: Any, **options: Any) -> Any:
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


sys.meta_path.insert(0, DeclareOperators())  # type: ignore[arg-type]
