"""The report at the end of a guarded run: one page of text, or the same as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from compile_guard.findings import Finding
from compile_guard.install import failed_seams
from compile_guard.trace_lock import TraceLock

SCHEMA_VERSION = 1


def environment() -> dict[str, str]:
    """Versions and devices, as bug forms ask for them."""
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(names) or "cpu",
    }


def as_dict(found: Sequence[Finding], lock: TraceLock, status: int | None) -> dict[str, Any]:
    """The report as plain data: `{"version", "environment", "status", "lock", "failed_seams", "findings"}`."""
    return {
        "version": SCHEMA_VERSION,
        "environment": environment(),
        "status": status,
        "lock": asdict(lock.statistics()),
        "failed_seams": failed_seams(),
        "findings": [asdict(finding) for finding in found],
    }


def as_text(found: Sequence[Finding], lock: TraceLock, status: int | None) -> str:
    """The report as a page: what happened first, then what was prevented, each with both threads' stacks."""
    happened = [finding for finding in found if not finding.prevented]
    prevented = [finding for finding in found if finding.prevented]
    env = environment()
    statistics = lock.statistics()
    lines = [
        f"compile_guard report: {_count(happened, 'finding')} happened, {len(prevented)} prevented",
        f"  torch {env['torch']}, Python {env['python']}, {env['devices']}",
        f"  trace lock: taken {statistics.num_acquired} times, {statistics.num_contended} had to wait, "
        f"{statistics.waited_s:.1f} s in all",
    ]
    if status is not None:
        lines.append(f"  the program ended with status {status}")
    for name, reason in failed_seams().items():
        lines.append(f"  seam {name} does not fit this torch, what it prevents is not covered: {reason}")
    for heading, group in (("Happened", happened), ("Prevented", prevented)):
        if group:
            lines += ["", f"{heading}:"]
            lines += [str(finding) for finding in sorted(group, key=lambda finding: -finding.count)]
    return "\n".join(lines) + "\n"


def as_json(found: Sequence[Finding], lock: TraceLock, status: int | None) -> str:
    """`as_dict` as indented JSON."""
    return json.dumps(as_dict(found, lock, status), indent=1) + "\n"


def _count(group: Sequence[Finding], noun: str) -> str:
    return f"{len(group)} {noun}{'' if len(group) == 1 else 's'}"
