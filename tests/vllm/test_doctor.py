"""`fused-slots doctor` beside the real vLLM: it says what the plugin would come to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def doctor(mode: str) -> str:
    result = subprocess.run(
        [Path(sys.executable).with_name("fused-slots"), "doctor", "--json"],
        env={**os.environ, "FUSED_SLOTS_VLLM": mode},
        capture_output=True,
        text=True,
        check=False,
    )
    state: str = json.loads(result.stdout)["vllm_plugin"]
    return state


@pytest.mark.parametrize(
    ("mode", "state"),
    [
        ("auto", "becomes active when vLLM starts"),
        ("off", "stays off: FUSED_SLOTS_VLLM=off"),
    ],
)
def test_it_says_whether_the_plugin_becomes_active(mode: str, state: str) -> None:
    assert doctor(mode) == state
