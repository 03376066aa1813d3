"""Draw bench/results/cuda_sweep.json as docs/pictures/sweep_*.svg: python -m bench.sweep_pictures.

Each picture carries a digest of the data it shows, so that a test can tell whether it is the
picture of the committed data, whatever version of matplotlib drew it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from fused_slots.cli.json_file import read_json

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "cuda_sweep.json"
PICTURES = ROOT / "docs" / "pictures"

DEVICE = {
    "slots": ("slots", "#1d4ed8"),
    "steady": ("step, same batch", "#0b7a3b"),
    "whole": ("step, every row copied", "#c1121f"),
}
"""What is drawn of the device's times: its name and colour."""

HOST = {"host": ("host, step with appends", "#111111")}
SIDES = {"ours": "-", "vllm": "--"}
VERSIONS = ("torch", "triton", "vllm")
_DIGEST = re.compile(r"sha256 ([0-9a-f]{64})")

Points = list[dict[str, Any]]


def digest(report: dict[str, Any], name: str) -> str:
    """What a picture shows, as a SHA-256: the sweep's points and the title's facts."""
    shown = [report["sweeps"][name], title(report)]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def digest_in(picture: Path) -> str:
    """The digest that a picture carries; empty if it has none."""
    found = _DIGEST.search(picture.read_text())
    return found[1] if found else ""


def title(report: dict[str, Any]) -> str:
    versions = [f"{name} {report[name]}" for name in VERSIONS if name in report]
    return ", ".join([report["card"], *versions])


def panels(name: str, points: Points) -> list[tuple[str, Points, dict[str, tuple[str, str]]]]:
    """Heading, points and measures of each panel."""
    if name == "context":
        sizes = sorted({(point["requests"], point["groups"]) for point in points}, reverse=True)
        return [
            (
                f"{requests} requests, {groups} groups",
                [p for p in points if (p["requests"], p["groups"]) == (requests, groups)],
                DEVICE,
            )
            for requests, groups in sizes
        ]
    fixed = {"requests": "groups", "groups": "requests"}[name]
    kept = f"{points[0][fixed]} {fixed}, {points[0]['context']:,} tokens of context"
    return [(f"device: {kept}", points, DEVICE), (f"host: {kept}", points, HOST)]


def draw(report: dict[str, Any], name: str, path: Path) -> None:
    """Draw one sweep."""
    drawn = panels(name, report["sweeps"][name])
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(1, len(drawn), figsize=(4.6 * len(drawn), 3.8), squeeze=False)
        for axis, (heading, points, measures) in zip(axes[0], drawn, strict=True):
            draw_panel(axis, name, points, measures)
            axis.set_title(heading, fontsize=9)
        figure.suptitle(title(report), fontsize=9)
        figure.tight_layout()
        facts = {"Date": None, "Creator": None, "Description": f"sha256 {digest(report, name)}"}
        figure.savefig(path, format="svg", metadata=facts)
        plt.close(figure)


def draw_panel(axis: Any, name: str, points: Points, measures: dict[str, Any]) -> None:
    places = [point[name] for point in points]
    for measure, (label, colour) in measures.items():
        for side, style in SIDES.items():
            medians = [point[measure][side]["median"] for point in points]
            name_of_line = f"{'vLLM' if side == 'vllm' else side}: {label}"
            axis.plot(places, medians, style, marker=".", color=colour, label=name_of_line)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(places, [short(place) for place in places])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("tokens of context" if name == "context" else name)
    axis.set_ylabel("microseconds")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def short(number: int) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--folder", type=Path, default=PICTURES)
    options = parser.parse_args()
    report = read_json(options.result)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, points in report["sweeps"].items():
        if points:
            path = options.folder / f"sweep_{name}.svg"
            draw(report, name, path)
            print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
