"""Make `torch.compile`, `torch.fx`, `make_fx` and `torch.export` safe in programs with several threads.

    import compile_guard
    compile_guard.install()     # before the threads start

Importing this package imports no torch and changes nothing.
"""

from compile_guard.activation_checkpoint import ReplayError, checkpoint
from compile_guard.device_cache import CacheInfo, compile, reset
from compile_guard.findings import Actor, Finding, FindingError, GuardError, GuardWarning, findings
from compile_guard.install import install, is_installed, uninstall
from compile_guard.session import exclusive, guarded, sealed, warmup
from compile_guard.trace_lock import LockStatistics, TraceLock
from compile_guard.tracing import TRACE_LOCK as trace_lock
from compile_guard.waits import DeadlockError
from compile_guard.worker import Worker, initializer

watch = findings.watch

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "CacheInfo",
    "DeadlockError",
    "Finding",
    "FindingError",
    "GuardError",
    "GuardWarning",
    "LockStatistics",
    "ReplayError",
    "TraceLock",
    "Worker",
    "checkpoint",
    "compile",
    "exclusive",
    "findings",
    "guarded",
    "initializer",
    "install",
    "is_installed",
    "reset",
    "sealed",
    "trace_lock",
    "uninstall",
    "warmup",
    "watch",
]
