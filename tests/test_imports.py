"""What an import costs and which way imports may go."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fused_slots"
SOURCES = sorted(PACKAGE.rglob("*.py"))
OPTIONAL = ("triton", "vllm", "torch_npu", "rich", "matplotlib")
HOT_PATH = [
    path
    for path in SOURCES
    if path.relative_to(PACKAGE).parts[0]
    not in ("inspect", "recording", "vllm", "cli", "__main__.py")
]


def imported_modules(path: Path, *, at_module_level_only: bool = False) -> set[str]:
    """Full names of what a source imports; type-checking blocks do not run and do not count."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in _running_nodes(tree, at_module_level_only):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _running_nodes(tree: ast.AST, at_module_level_only: bool) -> list[ast.AST]:
    nodes = []
    for node in ast.iter_child_nodes(tree):
        is_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_type_checking or (is_function and at_module_level_only):
            continue
        nodes += [node, *_running_nodes(node, at_module_level_only)]
    return nodes


def imports(path: Path, package: str, **options: bool) -> bool:
    names = imported_modules(path, **options)
    return any(name == package or name.startswith(f"{package}.") for name in names)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in paths]


def run(script: str, **environment: str) -> str:
    """Run a script in a fresh interpreter, away from the checkout, as an uninstalled package."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
        cwd=PACKAGE.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_importing_the_package_imports_no_optional_package() -> None:
    # torch itself may import triton; what counts is what this package adds.
    script = (
        "import sys, numpy, torch\n"
        "before = set(sys.modules)\n"
        "import fused_slots.block_tables\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})\n"
    )
    added = set(run(script).split())
    assert "fused_slots" in added
    assert not added & set(OPTIONAL)


def test_importing_the_package_loads_nothing_off_the_hot_path() -> None:
    script = (
        "import sys\n"
        "from fused_slots import AscendBlockTables\n"
        "print(*[m for m in sys.modules if m.startswith('fused_slots.')])"
    )
    loaded = run(script).split()
    assert "fused_slots.block_tables" in loaded
    assert not {m.split(".")[1] for m in loaded} & {"inspect", "recording", "vllm", "kernels"}


@pytest.mark.parametrize(
    "argv",
    [
        *(["--help"], ["replay", "--help"], ["report", "--help"], ["plan", "--help"]),
        *(["merge", "--help"], ["merge", "x"], ["plan", "--requests", "5"], ["explain", "5"]),
    ],
    ids=lambda argv: " ".join(argv),
)
def test_help_and_wrong_use_need_no_torch(argv: list[str]) -> None:
    script = (
        "import sys\n"
        "from fused_slots.cli import main\n"
        "try:\n"
        f"    main({argv})\n"
        "except SystemExit:\n"
        "    print('modules', *sys.modules)\n"
    )
    loaded = run(script).splitlines()[-1].split()
    assert "fused_slots.cli.parser" in loaded
    assert not {"torch", *OPTIONAL} & set(loaded)


def test_importing_and_building_takes_no_accelerator() -> None:
    script = (
        "import torch, fused_slots\n"
        "fused_slots.AscendBlockTables.from_groups([fused_slots.KVCacheGroup(16, 8)],\n"
        "    max_num_reqs=2, max_num_batched_tokens=4)\n"
        "print(torch.cuda.is_initialized())\n"
    )
    assert run(script) == "False"


def test_the_public_names_are_there_and_the_checkout_needs_no_installation() -> None:
    script = (
        "import fused_slots\n"
        "print(fused_slots.__file__, fused_slots.__version__, *sorted(fused_slots.__all__))\n"
        "[getattr(fused_slots, name) for name in fused_slots.__all__]\n"
    )
    file, version, *public = run(script).split()
    assert Path(file) == PACKAGE / "__init__.py"
    assert version[0].isdigit()
    assert public == [
        "AscendBlockTables",
        "BackendUnavailableError",
        "BlockIdError",
        "BlockTableError",
        "BlockTables",
        "ConfigurationError",
        "ContextParallel",
        "Fault",
        "FaultCode",
        "IntegrityError",
        "InvalidArgumentError",
        "KVCacheGroup",
        "PAD_SLOT_ID",
        "RowCapacityError",
        "SlotMappingMode",
        "get_block_table_width",
        "kernel_block_ids",
        "slots_of",
    ]


def test_only_the_vllm_folder_imports_vllm() -> None:
    importers = [path for path in SOURCES if imports(path, "vllm")]
    assert {path.relative_to(PACKAGE).parts[0] for path in importers} <= {"vllm"}


def test_the_package_needs_no_checkout() -> None:
    assert names([path for path in SOURCES if imports(path, "bench")]) == []


def test_nothing_below_the_vllm_folder_imports_it() -> None:
    allowed = {"vllm", "cli"}
    importers = [path for path in SOURCES if imports(path, "fused_slots.vllm")]
    assert {path.relative_to(PACKAGE).parts[0] for path in importers} <= allowed


def test_nothing_on_the_hot_path_imports_recordings() -> None:
    paths = [path for path in HOT_PATH if imports(path, "fused_slots.recording")]
    # The door to the flight recorder, which only who asks for it opens.
    assert names(paths) == ["base_tables.py"]
    assert _functions_importing(PACKAGE / "base_tables.py", "fused_slots.recording") == {
        "start_recording"
    }


def test_nothing_on_the_hot_path_imports_the_inspectors() -> None:
    importers = [
        path for path in HOT_PATH if imports(path, "fused_slots.inspect", at_module_level_only=True)
    ]
    assert names(importers) == []
    # Inside functions only the manager's two doors to them do, which no step opens.
    doors = [path for path in HOT_PATH if imports(path, "fused_slots.inspect")]
    assert names(doors) == ["between_steps.py"]
    assert _functions_importing(PACKAGE / "between_steps.py", "fused_slots.inspect") == {
        "explain",
        "check_integrity",
    }


def _functions_importing(path: Path, package: str) -> set[str]:
    return {
        function.name
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(package)
    }


def test_kernels_import_triton_and_each_other_only() -> None:
    kernels = sorted((PACKAGE / "kernels").rglob("*.py"))
    for path in kernels:
        for module in imported_modules(path):
            top = ".".join(module.split(".")[:2])
            allowed = {"triton", "typing", "__future__", "fused_slots.kernels"}
            if path == PACKAGE / "kernels" / "layout.py":  # numbers that the host has, too
                allowed.add("fused_slots.faults")
            assert {module.split(".")[0], top} & allowed, module


def test_the_oracle_imports_only_the_types() -> None:
    ours = {
        module
        for module in imported_modules(PACKAGE / "reference.py")
        if module.startswith("fused_slots")
    }
    assert {module for module in ours if module.count(".") == 1} == {"fused_slots.groups"}
    third_party = imported_modules(PACKAGE / "reference.py") - ours
    assert not {"numpy", "torch", "triton"} & third_party


@pytest.mark.parametrize("package", ["triton", "torch_npu"])
def test_accelerator_packages_are_imported_late(package: str) -> None:
    """Only kernels and backends, which are loaded on demand, may import them."""
    importers = [path for path in SOURCES if imports(path, package, at_module_level_only=True)]
    assert {path.relative_to(PACKAGE).parts[0] for path in importers} <= {"kernels", "backends"}
    for path in importers:
        assert path.name not in ("__init__.py", "base.py", "cpu.py") or "kernels" in path.parts


def test_backends_are_reached_through_their_registry() -> None:
    concrete = {
        "fused_slots.backends.cpu",
        "fused_slots.backends.cuda",
        "fused_slots.backends.ascend",
    }
    importers = [
        path
        for path in SOURCES
        if path.parent.name != "backends" and imported_modules(path) & concrete
    ]
    assert names(importers) == []
