"""`os.fork()` beside compiles: the child has a free lock and compiles, the parent goes on.

Each case is a program of its own: a forked pytest would run the other tests twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

PRELUDE = """
import os, signal, sys, threading, time
import torch
import compile_guard
from compile_guard import fork
from tests.threads import Puppet, until, wait

compile_guard.install(mode="record")
x = torch.ones(3)

def step(x):
    return x.sin() + 1

def child_compiles():
    'Fork; the child compiles, calls and traces, and says with its status whether it all worked.'
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs is killed
        try:
            ok = compile_guard.trace_lock.owner is None and compile_guard.waits.waiting() == {}
            compiled = torch.compile(lambda x: x * 3, backend="eager")
            ok = ok and torch.equal(compiled(x), x * 3)
            ok = ok and torch.fx.symbolic_trace(step)(x) is not None
            ok = ok and torch._C._is_multithreading_enabled()
            torch._dynamo.reset()
            thread = threading.Thread(target=lambda: compiled(x)); thread.start(); thread.join(20)
            os._exit(0 if ok and not thread.is_alive() else 3)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def backend_that_stands(inside, go_on):
    def backend(graph, inputs):
        inside.set()
        wait(go_on)
        return graph.forward
    return backend
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_fork_with_nobody_compiling() -> None:
    assert (
        run("""
        torch.compile(step, backend="eager")(x)
        print(child_compiles(), [found.code for found in compile_guard.findings()])
        """)
        == "0 []"
    )


def test_fork_waits_for_a_compile_in_another_thread_and_reports_it() -> None:
    assert (
        run("""
        inside, go_on = threading.Event(), threading.Event()
        compiled = torch.compile(step, backend=backend_that_stands(inside, go_on))
        compiler, watcher = Puppet("compiler"), Puppet("watcher")
        task = compiler.start(compiled, x)
        wait(inside)
        main = threading.get_ident()
        watcher.start(lambda: (until(lambda: main in compile_guard.waits.waiting()), go_on.set()))
        status = child_compiles()
        task.result()
        found = compile_guard.findings()
        print(status, [(each.code, each.prevented) for each in found], compile_guard.trace_lock.owner)
        """)
        == "0 [('fork-during-compile', True)] None"
    )


def test_fork_that_waits_too_long_happens_all_the_same_and_says_so() -> None:
    assert (
        run("""
        fork.FORK_WAIT_S = 0.05
        inside, go_on = threading.Event(), threading.Event()
        compiler = Puppet("compiler")
        task = compiler.start(torch.compile(step, backend=backend_that_stands(inside, go_on)), x)
        wait(inside)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if compile_guard.trace_lock.owner is None and compile_guard.trace_lock.acquire(timeout=5) else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert compile_guard.trace_lock.owner == compiler.ident
        go_on.set()
        task.result()
        print(status, [(each.code, each.prevented) for each in compile_guard.findings()])
        """)
        == "0 [('fork-during-compile', False)]"
    )


def test_fork_by_the_thread_that_holds_the_lock() -> None:
    assert (
        run("""
        with compile_guard.exclusive():
            pid = os.fork()
            if pid == 0:
                held = compile_guard.trace_lock.owned() and compile_guard.trace_lock.depth == 1
        if pid == 0:
            free = compile_guard.trace_lock.owner is None and torch._C._is_multithreading_enabled()
            thread = threading.Thread(target=torch.compile(step, backend="eager"), args=(x,), daemon=True)
            thread.start()
            thread.join(30)
            os._exit(0 if held and free and not thread.is_alive() else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), compile_guard.trace_lock.owner)
        """)
        == "0 None"
    )


def test_fork_while_a_reset_waits_leaves_the_childs_gate_open() -> None:
    assert (
        run("""
        inside, go_on = threading.Event(), threading.Event()
        @torch._dynamo.disable
        def stand():
            inside.set()
            wait(go_on)
        def long_step(x):
            stand()
            return x.sin()
        runner, resetter = Puppet("runner"), Puppet("resetter")
        running = runner.start(torch.compile(long_step, backend="eager"), x)
        wait(inside)
        resetting = resetter.start(torch._dynamo.reset)
        until(lambda: resetter.ident in compile_guard.waits.waiting())
        status = child_compiles()
        go_on.set()
        running.result()
        resetting.result()
        print(status)
        """)
        == "0"
    )


def test_fork_while_another_thread_reports_leaves_the_child_able_to_report() -> None:
    assert (
        run("""
        inside, go_on = threading.Event(), threading.Event()
        def hold():
            with compile_guard.findings._lock:
                inside.set()
                wait(go_on)
        holder = Puppet("holder")
        task = holder.start(hold)
        wait(inside)
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            with compile_guard.sealed():
                torch.compile(step, backend="eager")(x)
            os._exit(0 if compile_guard.findings() else 3)
        go_on.set()
        task.result()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """)
        == "0"
    )


def test_many_forks_under_compiling_threads() -> None:
    assert (
        run("""
        stop = threading.Event()
        def compile_on():
            number = 0
            while not stop.is_set():
                number += 1
                torch.compile(lambda x: x + number, backend="eager")(x)
        compilers = [Puppet(f"compiler-{number}") for number in range(2)]
        tasks = [each.start(compile_on) for each in compilers]
        statuses = {child_compiles() for _ in range(5)}
        stop.set()
        for task in tasks:
            task.result()
        print(statuses, compile_guard.trace_lock.owner)
        """)
        == "{0} None"
    )


def test_multiprocessing_by_fork_computes() -> None:
    assert (
        run("""
        import multiprocessing
        compiled = compile_guard.compile(step, backend="eager")
        compiled(x)
        def work(queue):
            queue.put(compiled(torch.ones(4)).shape[0])
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(queue.get())
        process.join(60)
        """)
        == "4"
    )
