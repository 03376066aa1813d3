"""Small packages that pose as an engine's release, written from its contract.

tests/vllm and the tests of the releases run the plugin against the engines themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fused_slots.vllm.releases.contract import Contract, Methods
from fused_slots.vllm.releases.vllm import VLLM_0_33

V2 = "vllm.v1.worker.gpu.block_table"
V2_READER = "vllm.v1.worker.gpu.model_runner"
V1 = "vllm.v1.worker.block_table"
V1_READER = "vllm.v1.worker.gpu_input_batch"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
ASCEND = "vllm_ascend.worker.v2.block_table"
ASCEND_PATCH = "vllm_ascend.patch.worker.patch_block_table"
ASCEND_V1 = "vllm_ascend.worker.block_table"
ASCEND_V1_READER = "vllm_ascend.worker.npu_input_batch"


def class_text(name: str, methods: Methods, base: str = "") -> str:
    """A class with these methods, which record how they were called."""
    body = "\n".join(
        f"    def {name}({', '.join(['self', *(f'{a}=None' for a in arguments)])}):"
        f" self.called = {name!r}"
        for name, arguments in methods.items()
    )
    return f"class {name}({base}):\n{body}\n"


def path_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def package_files(contract: Contract) -> dict[str, str]:
    """The files of a package that poses as the vllm of this contract."""
    version = contract.releases["vllm"][0]
    v2, v1 = contract.tables
    runner = contract.runners[0]
    execute = ", ".join(f"{name}=None" for name in runner.methods["execute_model"])
    return {
        "vllm/__init__.py": f"__version__ = {version!r}",
        "vllm/v1/kv_cache_interface.py": """
class KVCacheSpec:
    @property
    def uses_slot_mapping(self): return True
class MambaSpec(KVCacheSpec): pass
""",
        path_of(V2): class_text(v2.name, v2.methods),
        path_of(V1): class_text(v1.name, v1.methods),
        path_of(V1_READER): f"from {V1} import MultiGroupBlockTable",
        path_of(V1_RUNNER): """
class GPUModelRunner:
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return self.input_batch.block_table.append_row(scheduler_output, 0)
""",
        path_of(V2_READER): f"""
from {V2} import BlockTables
class GPUModelRunner:
    pcp_manager = None
    def execute_model(self, {execute}):
        self.block_tables.apply_staged_writes()
        return self.prepare_attn(scheduler_output) if scheduler_output else None
    def prepare_attn(self, input_batch):
        tables = self.block_tables.gather_block_tables(input_batch.idx_mapping, 1)
        slots = self.block_tables.compute_slot_mappings(
            input_batch.idx_mapping, input_batch.query_start_loc, input_batch.positions, 1)
        return tables, slots
""",
    }


def ascend_files(contract: Contract) -> dict[str, str]:
    """The files that pose as vllm-ascend's classes, their reader, and its patch that binds v2's."""
    v1, v2 = contract.tables
    own = {"__init__": v2.methods["__init__"]}
    return {
        path_of(ASCEND_V1): class_text(v1.name, v1.methods),
        path_of(ASCEND_V1_READER): f"""
from {ASCEND_V1} import MultiGroupBlockTable
def build(**arguments): return MultiGroupBlockTable(**arguments)
""",
        path_of(ASCEND): f"from {V2} import BlockTables\n"
        + class_text("AscendBlockTables", own, "BlockTables"),
        path_of(ASCEND_PATCH): f"""
from vllm.v1.worker.gpu import model_runner
from {ASCEND} import AscendBlockTables
model_runner.BlockTables = AscendBlockTables
""",
    }


def write_package(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        path.write_text(text)


FILES = package_files(VLLM_0_33)
