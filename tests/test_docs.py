"""README and docs are true: examples run, commands parse, links lead somewhere, tables match."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

import fused_slots
from fused_slots import BlockTableError, FaultCode, env
from fused_slots.cli import build_parser
from fused_slots.cli.diagnosis import MISSING, package_problems

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    for number, source in enumerate(blocks(page, "python"), start=1):
        exec(compile(source, f"{page.name}, example {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse_and_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in blocks(page, "console"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["fused-slots"]:
                build_parser().parse_args(words[1:])
            elif words[:1] == ["make"]:
                assert words[1] in targets, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_modules_and_scripts_that_a_sentence_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        for target in re.findall(r"\bmake ([a-z][\w-]*)", code):
            assert target in targets, code
        for module in re.findall(r"python3? -m ((?:bench|tests)[\w.]*)", code):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), code
        for script in re.findall(r"python3? ([\w/]+\.py)", code):
            assert (ROOT / script).exists(), code


def test_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "pictures"
    shutil.copy(folder / "concepts.py", tmp_path)
    runpy.run_path(str(tmp_path / "concepts.py"), run_name="__main__")
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in folder.glob("concepts_*.svg")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_readme_has_an_executed_example() -> None:
    assert blocks(ROOT / "README.md", "python")


def test_both_readmes_state_the_same_facts() -> None:
    facts = []
    for page in (ROOT / "README.md", ROOT / "README.zh-CN.md"):
        text, (example,) = page.read_text(), blocks(page, "python")
        facts.append({
            "links": {target for target in _LINK.findall(text) if not target.startswith("README")},
            "numbers": set(re.findall(r"\d+(?:\.\d+)*", text)),
            "example": [line.partition("#")[0].rstrip() for line in example.splitlines()],
        })  # fmt: skip
    assert facts[0] == facts[1]


def test_settings_list_every_environment_variable() -> None:
    rows = [
        "| `{}` | {} | {} |".format(
            variable.name,
            ", ".join(
                f"`{choice}`" if choice else "unset"
                for choice in sorted(
                    variable.choices, key=lambda choice: choice != variable.default
                )
            )
            + ", a whole number" * variable.number
            + f", {variable.text}" * bool(variable.text),
            variable.meaning,
        )
        for variable in env.VARIABLES
    ]
    table = "\n".join(["| variable | values (default first) | meaning |", "|---|---|---|", *rows])
    page = (ROOT / "docs" / "settings.md").read_text()
    assert f"{table}\n" in page, f"the table must be\n{table}"


def test_every_environment_variable_of_the_sources_is_in_the_table() -> None:
    sources = [path.read_text() for path in (ROOT / "fused_slots").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"FUSED_SLOTS_[A-Z_]*[A-Z]", text)}
    assert used == {variable.name for variable in env.VARIABLES}


def test_troubleshooting_has_every_error_fault_and_problem_of_the_doctor() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for name in fused_slots.__all__:
        error = getattr(fused_slots, name)
        if isinstance(error, type) and issubclass(error, BlockTableError):
            assert f"`{name}`" in page, name
    for code in FaultCode:
        assert f"| {code.name.lower().replace('_', ' ')} |" in page, code
    installed = dict.fromkeys(("triton", "triton-ascend", "torch-npu", "vllm"), MISSING)
    problems = [
        *package_problems({**installed, "triton": "3.6.0", "triton-ascend": "3.2.0",
                           "numpy": "2.4.0"}, True),
        *package_problems({**installed, "torch-npu": "2.10.0", "numpy": "2.3.0"}, True),
    ]  # fmt: skip
    assert len(problems) == 4
    for problem in problems:
        assert any(
            all(part in problem for part in known.split(" ... "))
            for known in re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
        ), problem
