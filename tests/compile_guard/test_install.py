"""Putting the seams in, and taking every one out again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import compile_guard
from compile_guard import torch_seams
from compile_guard.install import failed_seams
from compile_guard.tracing import TRACE_LOCK
from tests.threads import run_in_threads, until, wait

pytestmark = pytest.mark.usefixtures("clean")


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("COMPILE_GUARD")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(program: str, **environment: str) -> str:
    done = run_python(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


Snapshot = dict[tuple[str, ...], Any]


def snapshot() -> Snapshot:
    """Every function, with its code, and every attribute of every class, in all modules of torch and in `threading`.

    Nothing here knows what the guard patches, so that nothing can be forgotten.
    """
    seen: Snapshot = {}

    def note(where: tuple[str, ...], value: Any) -> None:
        seen[where] = value
        while isinstance(value, types.FunctionType):
            seen[(*where, "code")] = value.__code__
            seen[(*where, "globals")] = sorted(key for key in value.__globals__ if "compile_guard" in key)
            value = getattr(value, "__wrapped__", None)
            where = (*where, "wrapped")

    for module_name, module in list(sys.modules.items()):
        # Their attributes warn when they are looked at.
        if module_name.startswith(("torch.distributed", "torch.jit", "torch.ao", "torch.onnx", "torch.testing")):
            continue
        if not isinstance(module, types.ModuleType) or module_name.split(".")[0] not in ("torch", "threading"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.split(".")[0] in ("torch", "threading"):
                for attribute, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (staticmethod, classmethod, property)):
                        note((module_name, name, attribute), member)
            elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) or name == "compile_lock":
                note((module_name, name), value)
    return seen


def changes(before: Snapshot, after: Snapshot) -> set[tuple[str, ...]]:
    changed = set()
    for where, value in before.items():
        now = after.get(where)
        if not (now == value if isinstance(value, list) else now is value):
            changed.add(where)
    return changed


def test_uninstall_restores_every_object_that_install_changed() -> None:
    compile_guard.install()  # torch's own patches of itself come first, once
    compile_guard.uninstall()
    before = snapshot()
    hooks = threading.excepthook, sys.excepthook, threading.settrace, sys.getswitchinterval()
    compile_guard.install()
    during = changes(before, snapshot())
    names = {where[-1] if where[-1] not in ("code", "globals", "wrapped") else where[-2] for where in during}
    assert {"compile_lock", "trace", "get_or_compile", "reset", "is_compiling"} - names <= {"get_or_compile"}
    assert len(during) > 12, sorted(during)
    compile_guard.uninstall()
    assert changes(before, snapshot()) == set()
    assert hooks == (threading.excepthook, sys.excepthook, threading.settrace, sys.getswitchinterval())


def test_uninstall_restores_everything_after_compiles_traces_and_resets_too() -> None:
    compile_guard.install()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    compile_guard.uninstall()
    before = snapshot()
    compile_guard.install()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin() * 2, backend="aot_eager")(x).sum().backward()
    compile_guard.compile(lambda x: x.cos(), backend="eager")(x)
    torch.fx.symbolic_trace(lambda x: x + 1)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch._dynamo.reset()
    compile_guard.uninstall()
    assert changes(before, snapshot()) == set()


def test_install_again_changes_the_mode_and_nothing_else() -> None:
    compile_guard.install(mode="record")
    before = snapshot()
    compile_guard.install(mode="raise")
    assert changes(before, snapshot()) == set()
    assert compile_guard.findings.mode == "raise"
    compile_guard.install()
    assert compile_guard.findings.mode == "raise"


def test_uninstall_when_not_installed_does_nothing() -> None:
    before = snapshot()
    compile_guard.uninstall()
    assert changes(before, snapshot()) == set()


def test_many_threads_that_install_at_once_install_once() -> None:
    compile_guard.install()
    compile_guard.uninstall()
    before = snapshot()
    together = threading.Barrier(8)

    def install() -> None:
        together.wait(30)
        compile_guard.install(mode="record")

    run_in_threads(*[install] * 8)
    assert compile_guard.is_installed()
    compile_guard.uninstall()
    assert not compile_guard.is_installed()
    assert changes(before, snapshot()) == set()


def test_install_and_uninstall_in_turns_by_many_threads_ends_as_it_began() -> None:
    compile_guard.install()
    compile_guard.uninstall()
    before = snapshot()

    def turn() -> None:
        for _ in range(5):
            compile_guard.install(mode="record")
            compile_guard.uninstall()

    run_in_threads(*[turn] * 4)
    compile_guard.uninstall()
    assert changes(before, snapshot()) == set()


def test_every_seam_that_this_torch_needs_fits() -> None:
    compile_guard.install()
    assert failed_seams() == {}


def test_a_seam_that_does_not_fit_is_named_and_the_others_go_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(patches: Any) -> None:
        raise AttributeError("module 'torch' has no attribute 'gone'")

    broken = torch_seams.Seam("broken", "to be broken", gone)
    monkeypatch.setattr(torch_seams, "SEAMS", (*torch_seams.SEAMS[:2], broken, *torch_seams.SEAMS[2:]))
    compile_guard.install()
    assert failed_seams() == {"broken": "AttributeError: module 'torch' has no attribute 'gone'"}
    assert "seam broken does not fit what is installed" in caplog.text
    assert torch._dynamo.convert_frame.compile_lock is TRACE_LOCK
    compile_guard.uninstall()


def test_install_waits_for_a_trace_in_progress() -> None:
    compile_guard.install()
    compile_guard.uninstall()
    inside, go_on = threading.Event(), threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        inside.set()
        wait(go_on)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)

    def install() -> None:
        wait(inside)
        compile_guard.install(mode="record")

    def let_go() -> None:
        wait(inside)
        until(lambda: TRACE_LOCK.statistics().num_waiting, "install to wait")
        go_on.set()

    run_in_threads(lambda: compiled(torch.ones(2)), install, let_go)
    assert compile_guard.is_installed()
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2) + 1)


def test_uninstall_waits_for_a_trace_in_progress() -> None:
    compile_guard.install(mode="record")
    inside, go_on = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        wait(go_on)
        return x + 1

    def uninstall() -> None:
        wait(inside)
        compile_guard.uninstall()

    def let_go() -> None:
        wait(inside)
        until(lambda: TRACE_LOCK.statistics().num_waiting, "uninstall to wait")
        go_on.set()

    call = torch.nn.Module.__call__
    run_in_threads(lambda: torch.fx.symbolic_trace(traced), uninstall, let_go)
    assert torch.nn.Module.__call__ is call


def test_what_was_compiled_under_the_guard_works_on_without_it() -> None:
    compile_guard.install()
    plain = torch.compile(lambda x: x + 1, backend="eager")
    ours = compile_guard.compile(lambda x: x + 2, backend="eager")
    x = torch.ones(2)
    plain(x)
    ours(x)
    compile_guard.uninstall()
    for size in (2, 3):  # warm, and with a shape that must be compiled now
        x = torch.ones(size)
        assert torch.equal(plain(x), x + 1)
        assert torch.equal(ours(x), x + 2)
    assert torch.equal(ours(torch.ones(2, dtype=torch.float64)), torch.ones(2, dtype=torch.float64) + 2)


def test_somebody_elses_patch_over_ours_is_kept_and_named(caplog: pytest.LogCaptureFixture) -> None:
    compile_guard.install()
    ours = torch.fx.Tracer.trace

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    compile_guard.uninstall()
    original = torch.fx.Tracer.trace
    compile_guard.install()
    ours = torch.fx.Tracer.trace
    torch.fx.Tracer.trace = theirs  # type: ignore[method-assign]
    try:
        compile_guard.uninstall()
        assert torch.fx.Tracer.trace is theirs
        assert "Tracer.trace was patched again by somebody else" in caplog.text
        assert torch.fx.symbolic_trace(lambda x: x + 1)(torch.ones(1)).item() == 2  # ours, below theirs, still works
    finally:
        torch.fx.Tracer.trace = original  # type: ignore[method-assign]


def test_install_over_a_flag_that_an_earlier_overlap_left_set_heals_it() -> None:
    from torch.fx import _symbolic_trace as fx

    compile_guard.install()
    compile_guard.uninstall()
    call, getattr_ = torch.nn.Module.__call__, torch.nn.Module.__getattr__

    def stuck() -> None:
        """Overlap two traces, the first ending before the second."""
        inside, go_on, second_inside = threading.Event(), threading.Event(), threading.Event()

        def first_function(x: torch.Tensor) -> torch.Tensor:
            inside.set()
            wait(second_inside)
            return x + 1

        def second_function(x: torch.Tensor) -> torch.Tensor:
            second_inside.set()
            wait(go_on)
            return x + 2

        def trace_first() -> None:
            torch.fx.Tracer().trace(first_function)
            go_on.set()

        def trace_second() -> None:
            wait(inside)
            with contextlib.suppress(AssertionError):  # torch's own, of the patcher that the first trace took away
                torch.fx.Tracer().trace(second_function)

        run_in_threads(trace_first, trace_second)

    stuck()
    assert torch.nn.Module.__call__ is not call, "bare torch is not stuck: this test shows nothing"
    try:
        compile_guard.install(mode="record")
        assert torch.nn.Module.__call__ is call
        assert torch.nn.Module.__getattr__ is getattr_
        assert not getattr(fx, "_is_fx_tracing_flag", False)
        assert {found.code for found in compile_guard.findings()} <= {"stuck-flag", "module-patch"}
        assert compile_guard.findings()
        assert torch.compile(torch.nn.Linear(2, 3), backend="eager")(torch.ones(2)).shape == (3,)
    finally:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.nn.Module.__getattr__ = getattr_  # type: ignore[method-assign]


def test_a_users_own_patch_of_module_call_is_not_healed_away() -> None:
    compile_guard.install(mode="record")
    call = torch.nn.Module.__call__

    def users(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    torch.nn.Module.__call__ = users  # type: ignore[method-assign]
    try:
        torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
        with compile_guard.exclusive():
            pass
        assert torch.nn.Module.__call__ is users
    finally:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["loud", ""])
def test_bad_mode_lists_the_good_ones_and_installs_nothing(mode: str) -> None:
    with pytest.raises(ValueError, match=rf"install\(mode=\) must be one of off, record, warn, raise, got '{mode}'"):
        compile_guard.install(mode=mode)  # type: ignore[arg-type]
    assert not compile_guard.is_installed()


def test_bad_environment_lists_the_good_modes_and_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_GUARD", "on")
    with pytest.raises(ValueError, match="COMPILE_GUARD must be one of off, record, warn, raise, got 'on'"):
        compile_guard.install()
    assert not compile_guard.is_installed()


def test_environment_beats_the_mode_of_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_GUARD", "record")
    compile_guard.install(mode="raise")
    assert compile_guard.findings.mode == "record"


def test_off_installs_nothing_and_compile_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_GUARD", "off")
    before = snapshot()
    compile_guard.install(mode="raise")
    assert not compile_guard.is_installed()
    compiled = compile_guard.compile(lambda x: x + 1, backend="eager")
    assert not hasattr(compiled, "cache_info")
    assert compiled(torch.ones(1)).item() == 2
    module = compile_guard.compile(torch.nn.Linear(1, 1), backend="eager")
    assert type(module) is torch._dynamo.OptimizedModule
    assert changes(before, snapshot()) == set()


def test_off_leaves_every_other_part_of_the_api_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_GUARD", "off")
    with compile_guard.exclusive():
        pass
    with compile_guard.sealed():
        pass
    x = torch.ones(2, requires_grad=True)
    compile_guard.checkpoint(torch.sin, x).sum().backward()
    worker = compile_guard.Worker(lambda: 7)
    worker.start()
    worker.join()
    assert worker.result == 7
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compile_guard.guarded(compiled)(x) is not None
    compile_guard.warmup(compiled, [x])
    compile_guard.reset()
    assert not compile_guard.is_installed()


def test_suppressions_file_silences_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "suppressions"
    file.write_text("sealed\n")
    monkeypatch.setenv("COMPILE_GUARD_SUPPRESSIONS", str(file))
    compile_guard.install(mode="raise")
    with compile_guard.sealed():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert compile_guard.findings() == []


def test_suppressions_file_that_is_missing_is_an_error_and_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_GUARD_SUPPRESSIONS", "no/such/file")
    with pytest.raises(ValueError, match="no/such/file"):
        compile_guard.install()
    assert not compile_guard.is_installed()


def test_import_imports_no_torch_and_is_cheap() -> None:
    program = (
        "import sys, time; began = time.process_time(); import compile_guard; took = time.process_time() - began;"
        "print('torch' in sys.modules, took < 0.5, compile_guard.is_installed())"
    )
    assert said(program) == "False True False"


def test_import_changes_nothing() -> None:
    program = """
import sys, threading, warnings
import torch, torch._dynamo.convert_frame
lock, start, call = torch._dynamo.convert_frame.compile_lock, threading.Thread.start, torch.nn.Module.__call__
trace, filters, hooks = torch.fx.Tracer.trace, list(warnings.filters), (sys.excepthook, threading.excepthook)
import compile_guard
assert lock is torch._dynamo.convert_frame.compile_lock
assert (start, call, trace) == (threading.Thread.start, torch.nn.Module.__call__, torch.fx.Tracer.trace)
assert filters == list(warnings.filters) and hooks == (sys.excepthook, threading.excepthook)
print(threading.active_count())
"""
    assert said(program) == "1"


def test_torch_logs_accepts_the_package_by_name() -> None:
    """`TORCH_LOGS=+compile_guard` makes torch import it half-way through its own import."""
    assert said("import torch, compile_guard; print('fine')", TORCH_LOGS="+compile_guard") == "fine"


def test_uninstalled_fork_handlers_do_nothing() -> None:
    program = """
import os, compile_guard
compile_guard.install(); compile_guard.uninstall()
acquired = compile_guard.trace_lock.statistics().num_acquired
pid = os.fork()
if pid == 0:
    os._exit(compile_guard.trace_lock.statistics().num_acquired - acquired)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), compile_guard.trace_lock.statistics().num_acquired - acquired)
"""
    assert said(program) == "0 0"


def test_spec_of_every_seam_says_what_it_is_for() -> None:
    names = [seam.name for seam in torch_seams.SEAMS]
    assert len(set(names)) == len(names)
    assert all(seam.purpose for seam in torch_seams.SEAMS)
    assert names[0] == "trace_lock", "the others are put in under it"
