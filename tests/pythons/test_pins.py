"""What README and constraints.txt ask for can be installed from the public index alone.

pip's dry run, without the machine's own files and settings; wheels' metadata alone are read. Other
Pythons are asked themselves where they are installed, else pip plays them (`--python-version`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from tests.pythons.interpreters import MINORS, interpreter

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


def extra(*names: str) -> list[str]:
    """The package's requirements with extras; those that name the package itself spelled out."""
    found = list(PROJECT["dependencies"])
    for name in names:
        for requirement in PROJECT["optional-dependencies"][name]:
            own = Requirement(requirement)
            found += extra(*own.extras) if own.name == PROJECT["name"] else [requirement]
    return found


def for_python(minor: int, lines: list[str]) -> list[str]:
    """Requirements without their markers, if these hold: pip may judge them for another Python."""
    version = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
    kept = []
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(version):
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def resolve(
    minor: int,
    requirements: list[str],
    folder: Path,
    *,
    constraints: list[str] | None = None,
    public: bool = True,
) -> dict[str, str]:
    """Versions that pip would install, by name; the test fails with pip's words if it cannot."""
    report, pins = folder / "report.json", folder / "constraints.txt"
    pins.write_text("\n".join(for_python(minor, constraints or [])))
    python, other = interpreter(minor), []
    if python is None:
        python = sys.executable
        other = ["--python-version", f"3.{minor}", "--target", str(folder / "nowhere")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".cache" / "pip")}
    if public:
        environment = {
            name: value
            for name, value in environment.items()
            if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
        }
        environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
         "--use-feature=fast-deps", "--only-binary", ":all:", *other, "--report", str(report),
         "--constraint", str(pins), *for_python(minor, requirements)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chosen = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in chosen}


@pytest.mark.parametrize("minor", MINORS)
def test_the_environment_of_the_tests_resolves_publicly(minor: int, tmp_path: Path) -> None:
    chosen = resolve(minor, extra("dev", "cuda"), tmp_path, constraints=CONSTRAINTS)
    assert (chosen["torch"], chosen["triton"]) == ("2.13.0", "3.7.1")


def test_it_resolves_with_what_this_machine_is_set_up_with(tmp_path: Path) -> None:
    minor = sys.version_info[1]
    chosen = resolve(minor, extra("dev", "cuda"), tmp_path, constraints=CONSTRAINTS, public=False)
    assert chosen["torch"].split("+")[0] == "2.13.0"
    assert chosen["triton"] == "3.7.1"


@pytest.mark.parametrize(
    ("torch", "triton"), [("2.14.0", "3.8.0"), ("2.13.0", "3.7.1"), ("2.11.0", "3.6.0")]
)
def test_the_pairs_that_vllm_brings_satisfy_the_extra(
    torch: str, triton: str, tmp_path: Path
) -> None:
    chosen = resolve(12, [*extra("cuda"), f"torch=={torch}", f"triton=={triton}"], tmp_path)
    assert (chosen["torch"], chosen["triton"]) == (torch, triton)


@pytest.mark.parametrize("minor", [10, 11])
def test_the_ascend_extra_resolves_where_triton_ascend_has_wheels(
    minor: int, tmp_path: Path
) -> None:
    assert resolve(minor, extra("ascend"), tmp_path)["triton-ascend"].startswith("3.2.")


def test_pins_that_contradict_each_other_are_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ResolutionImpossible"):
        resolve(sys.version_info[1], ["torch==2.13.0", "triton==3.6.0"], tmp_path)
