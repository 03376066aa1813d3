"""Triton kernel -> TTIR -> linalg -> bishengir-compile -> final HIVM text, on any x86 CPU.

The last tool of the chain, `hivmc`, is part of CANN and absent here, so bishengir-compile always
ends with an error; whether it got as far as the final HIVM file is what tells success. Results
are kept on disk under the hash of everything they depend on, so a run compiles each variant once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from hivm import CostReport, Module, cost_report, parse
from hivm.bodies import Library, library

from fused_slots.backends.ascend.device import past_crashes

ASCEND_910B3 = "Ascend910B3"
ASCEND_A3 = "Ascend910_9391"
ASCEND_950 = "Ascend950PR_9589"
TARGETS = (ASCEND_910B3, ASCEND_950)
CORES = {ASCEND_910B3: 40, ASCEND_A3: 48, ASCEND_950: 64}
"""Vector cores. Code for an A3 is a 910B3's, which the gate tests."""

_CACHE_VERSION = "1"
# What triton-ascend's own driver passes on each family of devices, with the package's options.
_BISHENGIR_OPTIONS = {
    "Ascend910": ("--enable-auto-multi-buffer=false", "--enable-auto-bind-sub-block=true",
                  "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
                  "--enable-triton-kernel-compile=true"),
    "Ascend950": ("--enable-auto-multi-buffer=false", "--enable-auto-bind-sub-block=false",
                  "--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true"),
}  # fmt: skip
_BACKEND_OPTIONS: dict[str, dict[str, bool]] = {
    "Ascend910": {},
    "Ascend950": {"compile_on_910_95": True, "enable_auto_bind_sub_block": False,
                  "enable_select_analysis": True},
}  # fmt: skip


class CompileFailure(Exception):
    """A variant did not compile: names it, the target and the stage, with the compiler's words."""

    def __init__(self, variant: str, target: str, stage: str, message: str) -> None:
        self.variant, self.target, self.stage, self.message = variant, target, stage, message
        super().__init__(f"{variant} for {target} failed in {stage}:\n{message.strip()}")


@dataclass(frozen=True)
class Variant:
    """One specialisation of a Triton kernel: what the launcher would compile.

    `signature` maps every runtime parameter, in order, to a Triton type ("*i32", "i64", ...);
    `constexprs` every other parameter to its value; `options` is what the launcher tells the
    compiler.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, bool] = field(default_factory=lambda: {"multibuffer": False})


@dataclass(frozen=True)
class CompiledKernel:
    """The compiler's final text for one variant and target, parsed on demand."""

    variant: str
    target: str
    hivm: str

    @cached_property
    def module(self) -> Module:
        return parse(self.hivm)

    @cached_property
    def cost(self) -> CostReport:
        read = library(self.target)
        return cost_report(self.module, read if isinstance(read, Library) else None)

    @cached_property
    def figures(self) -> dict[str, int]:
        return self.cost.as_dict()


def compile_variant(variant: Variant, target: str = ASCEND_910B3) -> CompiledKernel:
    """The final HIVM of a variant, from the cache where possible. Raises CompileFailure."""
    path = cache_directory() / f"{_key(variant, target)}.mlir"
    if not path.exists():
        linalg = lower_to_linalg(variant, target)
        hivm = lower_to_hivm(linalg, target, variant.name, _bishengir_options(variant, target))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(hivm)
        partial.replace(path)
    return CompiledKernel(variant.name, target, path.read_text())


def cache_directory() -> Path:
    """FUSED_SLOTS_ASCEND_CACHE, or `.cache` beside this file."""
    return Path(os.environ.get("FUSED_SLOTS_ASCEND_CACHE", Path(__file__).parent / ".cache"))


def _bishengir_options(variant: Variant, target: str) -> tuple[str, ...]:
    every = variant.options.get("inject_barrier_all")
    return (
        *_BISHENGIR_OPTIONS[family(target)],
        *(["--enable-hivm-inject-barrier-all-sync=true"] if every else []),
    )


def lower_to_linalg(variant: Variant, target: str = ASCEND_910B3) -> str:
    """Triton -> TTIR -> linalg with triton-ascend's own passes."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    gpu_target = GPUTarget("npu", target, 0)
    backend = ascend.AscendBackend(gpu_target)
    options = backend.parse_options(_BACKEND_OPTIONS[family(target)] | dict(variant.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"hash": variant.name, "target": gpu_target, **options.__dict__}
    stage = "Triton's front end"
    try:
        source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constexprs))
        ttir = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        stage = "the TTIR passes"
        ttir = ascend.make_ttir(ttir, metadata, options)
        stage = "ttir to linalg"
        return str(past_crashes(
            lambda: ascend.ttir_to_linalg(ttir, metadata, options, named_ops=True), variant.name
        ))  # fmt: skip
    except subprocess.CalledProcessError as error:
        message = (error.stderr or b"").decode(errors="replace")
        raise CompileFailure(variant.name, target, stage, message) from error
    except Exception as error:
        raise CompileFailure(variant.name, target, stage, str(error)) from error


def lower_to_hivm(linalg: str, target: str, name: str, options: Sequence[str]) -> str:
    """linalg -> HFusion -> HIVM with buffers planned and flags set: `module.hivm.opt.mlir`."""
    tool = "bishengir-compile" if family(target) == "Ascend910" else "bishengir-compile-a5"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.mlir")
        source.write_text(re.sub(r', mix_mode = "[^"]*"', "", linalg))
        command = [
            str(files("ascendnpuir") / "bin" / tool), str(source), f"--target={target}",
            *options,
            f"--save-temps={folder}", "-o", str(Path(folder, "kernel.o")),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        final = Path(folder, "module.hivm.opt.mlir")
        if not final.exists():
            message = (done.stderr + done.stdout).replace(folder, "") or f"exit {done.returncode}"
            raise CompileFailure(name, target, tool, message)
        return final.read_text()


def family(target: str) -> str:
    """Ascend910 or Ascend950: which tool and which options."""
    return target[:9]


def _key(variant: Variant, target: str) -> str:
    """Hash of the kernel's source (callees included), its specialisation and the tool chain."""
    parts = {
        "cache": _CACHE_VERSION,
        "kernel": variant.kernel.cache_key,
        "signature": list(variant.signature.items()),
        "constexprs": sorted((k, repr(v)) for k, v in variant.constexprs.items()),
        "target": target,
        "options": [_bishengir_options(variant, target), _BACKEND_OPTIONS[family(target)],
                    dict(variant.options)],
        "tools": [version("triton-ascend"), version("ascendnpu-ir")],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
