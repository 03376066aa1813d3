"""vLLM 0.33's own v2 BlockTables, loaded alone, as a peer for benchmarks.

Importing all of vLLM slows every launch of the process, ours too. Here its two source files are
executed as they are, from an unpacked wheel, beside stand-ins for what they import of the rest.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language

LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
"""vLLM's compiled operations, for its view of pinned memory from the GPU."""

SOURCES = ("vllm.v1.worker.gpu.buffer_utils", "vllm.v1.worker.gpu.block_table")


@cache
def vllm_block_tables(root: Path) -> Any:
    """The class BlockTables of an unpacked vLLM wheel.

    Args:
        root: the folder that holds the package folder `vllm`.
    """
    torch.ops.load_library(str(root / LIBRARY))
    _stand_in("vllm.logger", init_logger=logging.getLogger)
    _stand_in("vllm.triton_utils", triton=triton, tl=triton.language)
    _stand_in("vllm.utils.platform_utils", is_uva_available=lambda: True)
    _stand_in(
        "vllm.utils.torch_utils",
        async_tensor_h2d=_upload,
        get_accelerator_view_from_cpu_tensor=torch.ops._C.get_cuda_view_from_cpu_tensor,
    )
    _stand_in("vllm.v1.attention.backends.utils", PAD_SLOT_ID=-1)
    for name in SOURCES:
        _parents(name)
        path = root / (name.replace(".", "/") + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[SOURCES[-1]].BlockTables


def _upload(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> torch.Tensor:
    """Host data to the device, pinned and without waiting."""
    if isinstance(data, list):
        host = torch.tensor(data, dtype=dtype or (out.dtype if out is not None else None))
    else:
        host = torch.as_tensor(data)
    pinned = host.pin_memory()
    if out is not None:
        return out.copy_(pinned, non_blocking=True)
    return pinned.to(device, dtype=dtype, non_blocking=True)


def _stand_in(name: str, **contents: Any) -> None:
    _parents(name)
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def _parents(name: str) -> None:
    parts = name.split(".")
    for length in range(1, len(parts)):
        parent = ".".join(parts[:length])
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = []
