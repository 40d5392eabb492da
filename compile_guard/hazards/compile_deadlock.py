"""D5: a thread that compiles waits for the GPU's autograd thread, which waits for the compile lock."""

from __future__ import annotations

import faulthandler
import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    import torch

    if not torch.cuda.is_available():
        return Affected(True, "it needs a CUDA device, whose backward runs on a thread of its own", runnable=False)
    return Affected(True, "there is a CUDA device: its backward, and a lazy compile of it, runs on the device's thread")


def trigger() -> str | None:
    import torch

    compiling, backward_begun = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Here this thread holds the compile lock. Tracing flex_attention calls autograd.grad at this point, too.
        compiling.set()
        wait(backward_begun)
        leaf = torch.ones(4, device="cuda", requires_grad=True)
        with torch.enable_grad():
            torch.autograd.grad((leaf * leaf).sum(), leaf)
        return graph.forward

    @torch.compile(backend=backend)
    def traced(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @torch.compile
    def trained(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    # A backward that comes from a cache on disk is not compiled, and asks for no lock.
    with torch._inductor.config.patch(force_disable_caches=True):
        y: Any = trained(torch.ones(4, device="cuda", requires_grad=True))

    def begin(gradients: Any) -> None:
        # On the device's thread, which from here goes straight on into the lazy backward compile.
        backward_begun.set()

    y.grad_fn.register_prehook(begin)

    def train() -> None:
        wait(compiling)
        y.backward(torch.ones_like(y))

    try:
        run_threads(20.0, compiler=lambda: traced(torch.ones(4, device="cuda")), trainer=train)
    except TimeoutError as error:
        faulthandler.dump_traceback()
        return (
            "deadlock: the compiling thread holds the compile lock and waits for the GPU's autograd thread, which "
            "waits"
            f"in another thread's backward for the compile lock ({error})"
        )
    return None


def mirror() -> None:
    import torch

    @torch.compile
    def trained(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    trained_once = threading.Event()

    def step() -> None:
        y: Any = trained(torch.ones(4, device="cuda", requires_grad=True))
        y.sum().backward()

    def first() -> None:
        step()
        trained_once.set()

    def second() -> None:
        wait(trained_once, 60.0)
        step()

    run_threads(first=first, second=second)


HAZARD = Hazard(
    id="D5",
    name="compile_deadlock",
    title="Compile lock and GPU autograd thread wait for each other",
    symptom="A threaded trainer stands still in its first backward, at no load, for ever.",
    mechanism=(
        "Thread X holds `compile_lock` and calls `autograd.grad` while it traces (flex_attention does, in "
        "`create_fw_bw_graph`): that waits for the GPU's one autograd thread. There Y's backward, in its lazy "
        "compile, waits for `compile_lock` in `compile_fx_backward`."
    ),
    links=("pytorch#140626", "pytorch#192004"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "lazy_backward"),
    finding="device-thread-wait",
    fix="Install the guard: who holds its lock runs backward on its own thread. Or warm up before starting threads.",
)
