"""Run by `make test-wheel` in an environment that has the built wheel and nothing else of ours.

Usage: python -P wheel_smoke.py PATH-OF-fused-slots
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import fused_slots
from fused_slots.host.rows import NATIVE
from fused_slots.recording.shipped import list_recordings


def main(command: str) -> None:
    """Check that the wheel is complete: import, data files, console script, judged replay."""
    package = Path(fused_slots.__file__).parent
    assert "site-packages" in package.parts, f"the source tree was imported: {package}"
    assert (package / "py.typed").is_file(), "py.typed is missing"
    assert NATIVE, "the native half is missing"
    assert len(list_recordings()) >= 7, f"recordings are missing: {list_recordings()}"
    run = subprocess.run(
        [command, "demo", "--json", "--no-picture"], stdout=subprocess.PIPE, text=True, check=True
    )
    document = json.loads(run.stdout)
    assert document["good"] is True
    assert document["replays"][0]["num_mismatches"] == 0
    assert document["replays"][0]["steps"] == 400
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([command, "report", "preemption", "--json", "-o", page], check=True)
        assert "Content-Security-Policy" in page.read_text()
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, fused_slots; print(*sys.modules)"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"triton", "vllm", "torch_npu", "matplotlib", "rich"} & set(loaded)
    assert not heavy, f"import fused_slots imports {heavy}"
    print(f"wheel {fused_slots.__version__}: import, data, command line, demo and report work")


main(sys.argv[1])
