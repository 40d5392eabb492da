"""D3: compiled autograd that one thread turns on compiles the backwards of all, and two threads cannot turn it on."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.compiled_autograd import compiled_autograd_is_global

    if compiled_autograd_is_global():
        return Affected(True, "`compiled_autograd_enabled` and `depth` are globals of `torch._dynamo.compiled_autograd`")
    return Affected(False, "`torch._dynamo.compiled_autograd` has no globals `compiled_autograd_enabled` and `depth`")


def backward() -> None:
    """One small backward of the calling thread."""
    import torch

    torch.ones(3, requires_grad=True).sin().sum().backward()  # type: ignore[no-untyped-call]


def enabled(compiled_in: list[str]) -> Any:
    """Compiled autograd, turned on for a block; each graph that it compiles leaves its thread's name in the list."""
    from torch._dynamo import compiled_autograd

    def compiler(graph: Any) -> Any:
        compiled_in.append(threading.current_thread().name)
        return graph

    return compiled_autograd._enable(compiler)


def in_one_thread() -> str | None:
    """One thread has it on; another, which has not, runs a backward."""
    compiled_in: list[str] = []
    on, over = threading.Event(), threading.Event()

    def holder() -> None:
        with enabled(compiled_in):
            on.set()
            wait(over)

    def innocent() -> None:
        wait(on)
        try:
            backward()
        finally:
            over.set()

    run_threads(holder=holder, innocent=innocent)
    if not compiled_in:
        return None
    return f"compiled autograd that one thread has turned on compiled the backward of another, `{compiled_in[0]}`"


def in_two_threads() -> str | None:
    """Two blocks overlap: the first to begin is the first to end."""
    compiled_in: list[str] = []
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        try:
            with enabled(compiled_in):
                first_in.set()
                wait(second_in)
        finally:
            first_out.set()

    def second() -> None:
        wait(first_in)
        with enabled(compiled_in):
            second_in.set()
            wait(first_out)
            backward()

    try:
        run_threads(first=first, second=second)
    except AssertionError as error:
        if "Nested Compiled Autograd Contexts" not in str(error):
            raise
        ran = "compiled" if compiled_in else "eager"
        return f"with two threads' blocks overlapping, the second's backward ran {ran}, and AssertionError: {error}"
    return None


def trigger() -> str | None:
    said = [in_one_thread(), in_two_threads()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    compiled_in: list[str] = []
    over = threading.Event()

    def first() -> None:
        with enabled(compiled_in):
            backward()
        over.set()

    def second() -> None:
        wait(over)
        backward()

    run_threads(first=first, second=second)
    if compiled_in != ["first"]:
        raise AssertionError(f"compiled autograd, turned on for one backward, compiled those of {compiled_in}")


HAZARD = Hazard(
    id="D3",
    name="compiled_autograd",
    title="Compiled autograd of one thread compiles the backwards of all",
    symptom=(
        "`AssertionError: Nested Compiled Autograd Contexts must return before their parent context`; backwards that are "
        "compiled in threads which did not ask for it, or run eager in one that did."
    ),
    mechanism=(
        "The autograd engine has one compiler for the process. Turning compiled autograd on (also by "
        "`torch._dynamo.config.compiled_autograd`) puts one in and later puts back the one that was found; flag and depth are "
        "module globals beside it."
    ),
    links=("pytorch#103822", "pytorch#106555", "pytorch#137821", "pytorch#138241"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("compiled_autograd",),
    finding="compiled-autograd",
    outcome="detected",
    fix=(
        "Turn it on in one thread alone, and hold `compile_guard.exclusive()` around that block and around the other threads' "
        "backwards; or leave it off, since AOTAutograd compiles backwards by itself."
    ),
)
