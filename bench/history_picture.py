"""The kept results of bench.regress as a picture: python -m bench.history_picture FILE.svg.

A panel for each operation: how each run's head stands to its base, with the interval, in the order
of the runs; a line for each workload.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.regress import HISTORY


def load(folder: Path = HISTORY) -> list[dict[str, Any]]:
    """Every kept run, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the runs to a file of any kind that matplotlib writes.

    Raises:
        SystemExit: there is no run.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if not runs:
        raise SystemExit("no run is kept: make bench-regress REGRESS_ARGS=--history")
    mpl.rcParams["svg.fonttype"] = "none"
    lines: dict[str, dict[str, list[tuple[int, float, float, float]]]] = {}
    for number, run in enumerate(runs):
        for name, result in run["results"].items():
            operation, _, load_name = name.removeprefix("bench_").partition("[")
            points = lines.setdefault(operation, {}).setdefault(load_name.rstrip("]"), [])
            points.append((number, result["ratio"], *result["interval"]))
    figure = Figure(figsize=(8, 2.2 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), squeeze=False)[:, 0]
    for panel, (operation, loads) in zip(panels, sorted(lines.items()), strict=True):
        for offset, (load_name, points) in enumerate(sorted(loads.items())):
            x, ratio, low, high = map(list, zip(*points, strict=True))
            x = [number + 0.06 * offset for number in x]
            below = [middle - least for middle, least in zip(ratio, low, strict=True)]
            above = [most - middle for middle, most in zip(ratio, high, strict=True)]
            panel.errorbar(x, ratio, [below, above], fmt="o-", markersize=3, label=load_name)
        panel.axhline(1, color="0.7", zorder=0)
        panel.set_title(operation, loc="left")
        panel.set_ylabel("head / base")
        panel.set_xticks(range(len(runs)), [f"{run['date'][:10]}\n{run['head']}" for run in runs])
        panel.legend(fontsize="x-small", ncols=4)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    draw(load(), parser.parse_args().picture)


if __name__ == "__main__":
    main()
