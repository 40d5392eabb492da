"""A CUDA build that sees no GPU: the device guard that the first compile puts in place must outlive that compile's thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_guard.torch_seams.device_guard import device_guard_may_end

ROOT = Path(__file__).parents[2]

PROGRAM = """
import threading, torch, compile_guard
compile_guard.install(mode="record")

def enter():
    with torch._subclasses.FakeTensorMode():
        torch.ones(2) + 1

def in_a_thread():
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return [bytes(size) for size in range(300)]  # what was freed is used again

for where in {order}:
    where()
print(len(compile_guard.findings()), threading.active_count())
"""


@pytest.mark.skipif(not device_guard_may_end(), reason="this torch is no CUDA build, or has no such guard")
@pytest.mark.parametrize("order", ["(in_a_thread, enter)", "(in_a_thread, in_a_thread)", "(enter, in_a_thread, enter)"])
def test_fake_modes_after_the_thread_of_the_first_has_ended(order: str) -> None:
    """Freed memory is overwritten, so that its use shows."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "MALLOC_PERTURB_": "165"}
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(order=order)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "0 1\n"), done.stderr[-3000:]
