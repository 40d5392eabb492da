"""Findings in torch's own logs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_guard import waits
from compile_guard.findings import findings, is_inside_torch
from compile_guard.tracing import TRACE_LOCK
from tests.threads import Puppet, until, wait

ROOT = Path(__file__).resolve().parents[2]
OVER_THE_LIMIT = """
import torch, compile_guard
compile_guard.install(mode="record")
torch._dynamo.config.recompile_limit = 1
step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
for n in range(1, 4):
    step(torch.ones(n))
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", OVER_THE_LIMIT], capture_output=True, text=True, env=env, timeout=120, check=True
    )


def test_torch_logs_shows_findings_once_each() -> None:
    shown = run(TORCH_LOGS="+compile_guard").stderr
    title = "runs eager from now on for inputs it is not compiled for, in every thread and on every device [recompile-limit]"
    assert shown.count(title) == 1
    assert shown.count("is compiled, but ran eager [eager-call]") == 1, "of two calls that ran eager"
    silent = run().stderr
    assert "[recompile-limit]" not in silent
    assert "[eager-call]" not in silent


def test_a_finding_is_logged_for_information(guard: Any, caplog: pytest.LogCaptureFixture) -> None:
    step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with caplog.at_level(logging.INFO, "compile_guard"), torch._dynamo.config.patch(recompile_limit=1):
        for n in range(1, 3):
            step(torch.ones(n))
    said = [record for record in caplog.records if record.name == "compile_guard"]
    assert {record.levelname for record in said} == {"INFO"}
    assert sum("[recompile-limit]" in record.getMessage() for record in said) == 1


def test_torch_trace_has_each_finding_as_an_artifact(tmp_path: Path) -> None:
    run(TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    found = [number for number, line in enumerate(lines) if '"compile_guard_finding"' in line]
    for at in found:
        artifact = json.loads(lines[at][lines[at].index("{") :])["artifact"]
        assert artifact == {"name": "compile_guard_finding", "encoding": "json"}
    payloads = [json.loads(lines[at + 1].strip()) for at in found]
    assert [(each["code"], each["prevented"]) for each in payloads] == [("recompile-limit", False), ("eager-call", False)]
    assert all(each["now"]["tid"] > 0 for each in payloads)


@pytest.mark.parametrize("slow_in", ["the compiler", "the program"])
def test_a_stall_says_whether_the_holder_still_compiles(
    guard: Any, puppet: Any, monkeypatch: pytest.MonkeyPatch, slow_in: str
) -> None:
    monkeypatch.setattr(waits, "STALL_S", 0.05)
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        wait(go_on)

    holder: Puppet = puppet()
    waiter: Puppet = puppet()

    def hold() -> None:
        with TRACE_LOCK.hold("torch.compile of f"):
            if slow_in == "the program":
                slow()
            else:
                inside.set()
                # A wait that is called from a frame of torch's, as that for Inductor's worker processes is.
                eval(compile("go_on.wait(60)", torch.__file__, "eval"), {"go_on": go_on})

    held = holder.start(hold)
    wait(inside)
    waited = waiter.start(TRACE_LOCK.acquire, "another")
    (stall,) = until(lambda: [found for found in findings() if found.code == "stall"])
    assert is_inside_torch(holder.ident) == (slow_in == "the compiler")
    go_on.set()
    held.result()
    assert waited.result()
    waiter.do(TRACE_LOCK.release)
    assert stall.other is not None
    assert ("a compile that is still running" in stall.other.doing) == (slow_in == "the compiler")
    assert ("warmup()" in stall.fix) == (slow_in == "the compiler")
