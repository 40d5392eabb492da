"""Tests of Triton kernels: on CUDA, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
RUNS = HAS_TRITON and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel_runs = pytest.mark.skipif(not RUNS, reason="needs Triton, and CUDA or TRITON_INTERPRET=1")


def hold_in_the_interpreter(file: str) -> None:
    """Run a file of tests in a process of its own: Triton decides when it is imported whether it interprets."""
    if RUNS or not HAS_TRITON:
        pytest.skip("the tests run in this process" if RUNS else "no Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
