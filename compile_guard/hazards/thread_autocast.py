"""D4: a thread that is started inside an autocast block computes in float32."""

from __future__ import annotations

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads


def affected() -> Affected:
    # Documented ("the autocast state is thread-local"); torch has no switch or name that says so, hence no feature to ask for.
    return Affected(True, "autocast is a thread-local, off in a new thread")


def trigger() -> str | None:
    import torch

    x = torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        here = (x @ x).dtype
        there: torch.dtype = run_threads(worker=lambda: x @ x)["worker"].dtype
    if here == there:
        return None
    return f"inside one autocast block a product is {here} in the thread that opened it, and {there} in a thread started there"


def mirror() -> None:
    import torch

    x = torch.ones(4, 4)

    def product() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x).dtype

    if run_threads(worker=product)["worker"] != torch.bfloat16 or (x @ x).dtype != torch.float32:
        raise AssertionError("autocast is not that of its thread")


HAZARD = Hazard(
    id="D4",
    name="thread_autocast",
    title="A thread started inside an autocast block has no autocast",
    symptom=(
        "Activations in float32 and memory as without autocast in worker threads; `expected scalar type BFloat16 but found "
        "Float` where they meet tensors of the starting thread; one more compile of every function that both call."
    ),
    mechanism=(
        "Whether autocast is on, for which device, and with which dtype are thread-locals, off in a new thread; compiled "
        "functions guard on them. Autograd's device threads have those of the thread that calls `backward`."
    ),
    links=("pytorch#125186", "pytorch#132715", "pytorch#133938"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("autocast_inherit",),
    finding="thread-autocast",
    fix=(
        "Install the guard, whose threads start with their starter's autocast, without its cache of casts; or use `Worker`; "
        "or enter `torch.autocast` in each thread. Pools (`ThreadPoolExecutor`) need `initializer=compile_guard.initializer()`."
    ),
)
