"""The doctor command: is this machine fit to run."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from fused_slots.cli.diagnosis import Diagnosis, diagnose
from fused_slots.cli.progress import announce
from fused_slots.cli.result import Result, Status
from fused_slots.vllm.report import EngineReport


def run_doctor(args: argparse.Namespace) -> Result:
    """Diagnose; a problem is a finding."""
    announce(args, "doctor: trying every device")
    diagnosis = diagnose()
    document = {"good": not diagnosis.problems, **asdict(diagnosis)}
    status = Status.FINDING if diagnosis.problems else Status.GOOD
    return Result(status, document, _text(diagnosis))


def _text(diagnosis: Diagnosis) -> str:
    return "\n".join(
        [
            "Versions",
            *(f"  {name:<27}{version}" for name, version in diagnosis.versions.items()),
            "Backends",
            *(f"  {name:<27}{state}" for name, state in diagnosis.backends.items()),
            "Staging of appends",
            f"  {diagnosis.staging}",
            "vLLM plugin",
            f"  {diagnosis.vllm_plugin}",
            *_engine(diagnosis.engine),
            "Environment",
            *(f"  {name:<27}{value}" for name, value in diagnosis.environment.items()),
            "Problems" if diagnosis.problems else "No problem found",
            *(f"  {problem}" for problem in diagnosis.problems),
        ]
    )


def _engine(engine: EngineReport) -> list[str]:
    """The engine at hand, its runner, and the classes that ours stand in for."""
    if not engine.releases:
        return []
    releases = [f"{name} {version or 'of no version'}" for name, version in engine.releases.items()]
    facts = {
        "engine": " with ".join(releases),
        "contract": engine.contract or "none: no release that is known",
        "runner": engine.runner,
        "replaces": ", ".join(engine.replaces),
        "in the way": engine.obstacle or "nothing",
    }
    return [f"  {name:<27}{fact}" for name, fact in facts.items() if fact]
