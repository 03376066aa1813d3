"""A result as tables, and as one archive to send."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ASSUMPTIONS = {
    "words": "transfers to GM write the bytes they are given and no more",
    "lines": "a line may be read by scalars while another program writes its other half",
    "cache": "the scalar unit's cache of GM is invalidated when a kernel starts",
    "events": "events that library calls use are free while they run; scalar reads wait",
    "modes": "casts wrap or saturate, division is off by at most one unit",
    "dealing": "programs are dealt to cores in turn",
    "lives": "slots, tables, lengths and faults are exact",
    "graphs": "a captured launch replays with other contents",
    "random": "the same in a long random run",
}


def tables(result: dict[str, Any]) -> str:
    """Markdown tables of a result, as docs/evidence/ascend.md may hold them."""
    parts = result["parts"]
    lines = [f"# {title(result)}", ""]
    versions = found(parts, "machine").get("versions", {})
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    checked = [
        (text, name, parts[name]["status"], _short(parts[name]))
        for name, text in ASSUMPTIONS.items()
        if name in parts
    ]
    lines += _table(("what is assumed", "part", "end", "found"), checked)
    latencies = found(parts, "latencies")
    if latencies:
        lines += _table(("latency", "value"), latencies.items())
    lines += _table(
        ("batch", "slots, us", "steady step, us", "vllm-ascend's slots, us",
         "profiler: slots, us", "profiler: step, us"),
        _times(parts),
    )  # fmt: skip
    others = [
        (name, part["status"], part["seconds"], part.get("error", ""))
        for name, part in parts.items()
        if not part["status"].startswith("ok")
    ]
    return "\n".join(lines + _table(("part that did not end well", "end", "s", "error"), others))


def title(result: dict[str, Any]) -> str:
    """The device and its cores."""
    machine = found(result["parts"], "machine")
    return f"{machine.get('name', result['device'])}, {machine.get('cores')} vector cores"


def found(parts: dict[str, Any], name: str) -> dict[str, Any]:
    """What a part found, as far as it came."""
    result: dict[str, Any] = parts.get(name, {}).get("result", {})
    return result


def _short(part: dict[str, Any]) -> str:
    return json.dumps(part.get("result", part.get("error", ""))).replace("|", "/")


def _times(parts: dict[str, Any]) -> Iterable[tuple[object, ...]]:
    ours, public, profiled = (found(parts, n) for n in ("kernels", "public", "profiler"))
    for row, times in ours.items():
        theirs, by_profiler = public.get(row, {}), profiled.get(row, {})
        by_kernel = [
            next((us for name, us in by_profiler.items() if kernel in name), "")
            for kernel in ("slots_on_ascend", "step_on_ascend")
        ]
        their_slots = theirs.get("slots_us", "") if isinstance(theirs, dict) else ""
        yield row, times["slots_us"], times["steady_step_us"], their_slots, *by_kernel


def _table(head: tuple[str, ...], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, ""] if lines else []


def send(result: dict[str, Any], path: Path) -> str:
    """Writes the archive beside the result; says what to do with it."""
    version = found(result["parts"], "machine").get("versions", {}).get("fused_slots", "unknown")
    name = re.sub(r"\W+", "_", f"ascend_first_run {version} {title(result)}")
    archive = path.with_name(f"{name}.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("result.json", json.dumps(result, indent=1))
        file.writestr("tables.md", tables(result))
    return (
        f"{archive} holds the result, its tables, the versions and the device; no model, prompt or "
        "path of yours.\nAttach it to a new issue in the project's issue tracker, titled "
        f"'First run on {title(result)}'."
    )
