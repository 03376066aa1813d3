"""Fit the factors of fused_slots/cost_model.py to the measured sweeps, and judge them.

    python -m bench.fit_cost_model            # prints what the module must contain
    python -m bench.fit_cost_model --write    # puts it there

Factors are non-negative and minimise the sum of squared relative errors over the decode sweep (for
the writes: the profiled steps of the same machine). Held out are the decode workloads of
`bench.cuda_compare`: one run of that machine, and four of other machines of the kind on other days
and with other Tritons.
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_slots import cost_model
from fused_slots.cost_model import TERMS, Load
from tests.workloads import EIGHT, FOUR, SIX

RESULTS = Path(__file__).parent / "results"
TIMED = {"slots": "slots", "step": "steady", "whole": "whole", "host": "host"}
WORKLOADS = {
    "decode 256x6": Load(256, SIX, 8192, 8192),
    "decode 1024x8": Load(1024, EIGHT, 4096, 16384),
    "decode 8x4": Load(8, FOUR, 8192, 8192),
    "spec 128x4": Load(128, SIX, 8192, 8192, tokens=4),
    "decode 64x12": Load(64, SIX * 2, 8192, 65536),
}
HELD_OUT = ("", "_before", "_triton_3.6.0", "_triton_3.7.1", "_triton_3.8.0")

Array = npt.NDArray[np.float64]
Points = list[tuple[Load, float]]
"""Loads with their measured microseconds."""


def read(name: str) -> Any:
    """One of the files of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def swept(quantity: str) -> Points:
    """The points of the sweep that time a quantity."""
    points = []
    for name, results in read("cuda_sweep")["sweeps"].items():
        for result in results:
            requests, groups, context = (result[key] for key in ("requests", "groups", "context"))
            # The workload 64 x 12 of the contexts' sweep has a capacity of its own.
            wide = name == "context" and groups == 12
            capacity = 65536 if wide else max(8192, requests)
            sizes = tuple(SIX[g % len(SIX)] for g in range(groups))
            # One request is the same batch in any order, so nothing is copied whole.
            if TIMED[quantity] in result and not (quantity == "whole" and requests == 1):
                load = Load(requests, sizes, context, capacity)
                points.append((load, result[TIMED[quantity]]["ours"]["median"]))
    return points


def compared(name: str, quantity: str) -> Points:
    """The decode workloads of a comparison that time a quantity."""
    points = []
    for result in read(name)["results"]:
        load = WORKLOADS.get(result["workload"])
        if load is None:
            continue
        if quantity == "writes":
            if "profile" in result:
                points.append((load, result["profile"]["ours"]["device"]))
        elif TIMED[quantity] in result:
            points.append((load, result[TIMED[quantity]]["ours"]["median"]))
    return points


def fit(rows: Array, measured: Array, scale: Array) -> Array:
    """Non-negative factors with the least sum of squared errors over `scale`, by the best terms."""
    scaled, wanted = rows / scale[:, None], measured / scale
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            factors = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)[0]
            error = float(((scaled[:, chosen] @ factors - wanted) ** 2).sum())
            if (factors >= 0).all() and error < least - 1e-9:
                best, least = np.zeros(rows.shape[1]), error
                best[chosen] = factors
    return best


def terms_of(quantity: str, points: Points) -> Array:
    """The terms of a quantity, [points, terms]."""
    return np.array([list(TERMS[quantity](load).values()) for load, _ in points])


def fitted() -> tuple[dict[str, dict[str, float]], dict[str, tuple[float, float]]]:
    """Factors and errors, rounded as they are kept."""
    factors: dict[str, Array] = {}
    errors = {}
    for quantity in TERMS:
        writes = quantity == "writes"
        points = compared("cuda_profile", quantity) if writes else swept(quantity)
        files = [f"cuda_compare{suffix}" for suffix in HELD_OUT]
        others = [point for name in files for point in compared(name, quantity)]
        measured = np.array([value for _, value in points])
        # A profiled step is the step of the other model and what its writes add.
        before = np.zeros(len(points))
        if writes:
            before = np.array([value for _, value in compared("cuda_compare", "step")])
        rows = terms_of(quantity, points)
        factors[quantity] = fit(rows, measured - before, measured).round(4)
        judged = []
        for some in (points, others):
            predicted = terms_of(quantity, some) @ factors[quantity]
            if writes:
                predicted += terms_of("step", some) @ factors["step"]
            judged.append(np.abs(predicted / [value for _, value in some] - 1).max())
        errors[quantity] = (round(float(judged[0]), 2), round(float(judged[1]), 2))
    names = {quantity: list(TERMS[quantity](WORKLOADS["decode 8x4"])) for quantity in TERMS}
    return (
        {q: dict(zip(names[q], found.tolist(), strict=True)) for q, found in factors.items()},
        errors,
    )


def source() -> str:
    """`FACTORS` and `ERRORS` as they stand in the module."""
    factors, errors = fitted()
    lines = ["FACTORS: dict[str, dict[str, float]] = {"]
    for quantity, of in factors.items():
        lines += [f'    "{quantity}": {{']
        lines += [f'        "{term}": {value},' for term, value in of.items()]
        lines += ["    },"]
    lines += ["}", '"""Microseconds for one of each term."""', ""]
    lines += ["ERRORS: dict[str, tuple[float, float]] = {"]
    lines += [f'    "{quantity}": {pair},' for quantity, pair in errors.items()]
    return "\n".join([*lines, "}\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put them into the module")
    text = source()
    print(text, end="")
    if parser.parse_args().write:
        path = Path(cost_model.__file__)
        pattern = r"FACTORS: dict.*?(?=\"\"\"The largest relative error)"
        path.write_text(re.sub(pattern, lambda _: text, path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
