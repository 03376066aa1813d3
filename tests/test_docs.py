"""README and docs are true: examples run, commands parse, links lead somewhere, tables match."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fused_slots import env
from fused_slots.cli import build_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

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
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_readme_has_an_executed_example() -> None:
    assert blocks(ROOT / "README.md", "python")


def test_readme_lists_every_environment_variable() -> None:
    rows = [
        "| `{}` | {} | {} |".format(
            variable.name,
            ", ".join(
                f"`{choice}`" if choice else "unset"
                for choice in sorted(
                    variable.choices, key=lambda choice: choice != variable.default
                )
            )
            + ", a number" * variable.number,
            variable.meaning,
        )
        for variable in env.VARIABLES
    ]
    table = "\n".join(["| variable | values (default first) | meaning |", "|---|---|---|", *rows])
    assert f"{table}\n\n" in (ROOT / "README.md").read_text(), f"the table must be\n{table}"


def test_every_environment_variable_of_the_sources_is_in_the_table() -> None:
    sources = [path.read_text() for path in (ROOT / "fused_slots").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"FUSED_SLOTS_[A-Z_]*[A-Z]", text)}
    assert used == {variable.name for variable in env.VARIABLES}
