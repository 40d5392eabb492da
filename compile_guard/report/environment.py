"""Versions, devices and switches, as bug forms ask for them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Callable

_SWITCHES = ("COMPILE_GUARD", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "CUDA_", "OMP_NUM_THREADS", "PYTHON_GIL")
_LIBRARIES = ("numpy", "triton", "transformers")


def environment() -> dict[str, str]:
    """What `python -m torch.utils.collect_env` says, in its order, as far as it matters to threads and compiles."""
    import torch

    cudnn_version: Callable[[], int | None] = torch.backends.cudnn.version
    has_cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_cuda else []
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    facts = {
        "torch": torch.__version__,
        "debug build": "yes" if torch.version.debug else "no",
        "built for CUDA": torch.version.cuda or "no",
        "built for ROCm": getattr(torch.version, "hip", None) or "no",
        "platform": platform.platform(),
        "python": platform.python_version(),
        "GIL": "on" if gil else "off" if sysconfig.get_config_var("Py_GIL_DISABLED") else "on",
        "CUDA available": "yes" if has_cuda else "no",
        "devices": ", ".join(gpus) or "cpu",
        "cuDNN": str(cudnn_version()) if has_cuda else "not used",
        "CPUs": str(os.cpu_count()),
        "threads of an op": str(torch.get_num_threads()),
        "compile_guard": sys.modules["compile_guard"].__version__,
    }
    for library in _LIBRARIES:
        try:
            facts[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            facts[library] = "not installed"
    return facts | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SWITCHES)}
