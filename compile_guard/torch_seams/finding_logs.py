"""Findings in torch's own logs: `TORCH_LOGS=+compile_guard` for people, an artifact in `TORCH_TRACE` for tlparse."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

from compile_guard.findings import Finding, findings
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

logger = logging.getLogger("compile_guard")


def _finding_logs(patches: Patches) -> None:
    from torch._logging._internal import trace_structured_artifact

    told: set[tuple[str, bool]] = set()

    def tell(finding: Finding) -> None:
        which = finding.key, finding.prevented
        if which in told:
            return
        told.add(which)
        logger.info("%s", finding)
        # Beside the compile that the reporting thread is in, if any. Does nothing where no trace is asked for.
        trace_structured_artifact("compile_guard_finding", "json", lambda: json.dumps(asdict(finding)))

    patches.on_undo("findings in torch's logs", findings.listen(tell))


SEAMS = (Seam("finding_logs", "findings appear in torch's own logs and structured trace", _finding_logs),)
