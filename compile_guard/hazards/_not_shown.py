"""What is known of, or was looked for, and has no entry: why, and what was tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotShown:
    """A hazard that no trigger of the catalogue shows."""

    id: str
    title: str
    because: str
    """Why there is no entry, and what was tried, in whole sentences."""


NOT_SHOWN: tuple[NotShown, ...] = (
    NotShown(
        "A5",
        "Another thread's annotations on the nodes of a graph (`torch.fx.traceback.current_meta`)",
        "Entry A5 shows make_fx. What `annotate` and `preserve_node_meta` set is one dict for the process: inside one thread's "
        "`with annotate(...)` make_fx of another put it on its nodes (seen on 2.13.0 and 2.14.1; 2.9.1 has the same dict). "
        "Traces exclude each other under the guard, but such a block is the program's own, may hold a collective, and takes no "
        "lock. Hold `compile_guard.exclusive()` in blocks that annotate, or trace before the threads start (pytorch#184917).",
    ),
    NotShown(
        "B4",
        "A dimension turns dynamic because another thread had another size (automatic dynamic shapes)",
        "Seen on 2.9.1, 2.13.0 and 2.14.1: of two threads with one shape each, the second to call a function has it compiled "
        "with symbolic sizes, since the history is kept by file, line and name. That is right for shapes that vary, and at the "
        "second size nothing tells the two apart. `compile_guard.compile` keeps a history for each device; else give "
        "`dynamic=False` where each thread has one shape.",
    ),
    NotShown(
        "D4",
        "The cache of autocast's casts is one for all threads",
        "Entry D4 shows the thread without autocast. While one thread is inside an autocast block, another that shares its "
        "weights gets the casts that the first has made: after `optimizer.step()` those of the old weights (seen on 2.9.1, "
        "2.13.0, 2.14.1), and on 2.9.1, where the first made them under `no_grad`, a cast without gradient. Nothing tells two "
        "threads with a model each, which are right, from two that share one, and to turn the cache off behind the program's "
        "back would compile every function again. Where threads share trained weights, use "
        "`torch.autocast(..., cache_enabled=False)`.",
    ),
    NotShown(
        "B9",
        "`torch._dynamo.reset()` in one thread drops what every other thread has compiled",
        "What it breaks is entry B8, and the guard ends it: a reset waits until no compiled call runs. That every thread then "
        "compiles again is what the function is for. To drop one device's code alone, use `compile_guard.reset(device)`.",
    ),
    NotShown(
        "B7",
        "`set_stance(skip_guard_eval_unsafe=True)` in one thread turns guards off in another",
        "torch sets the C flag at the entry of each compiled call and puts back what it found at its end, so that another "
        "thread's call resets it for itself. What is left is the time between one thread's entry and its own look into the "
        "cache, in which another's entry must fall: nothing of a program runs there, and no order could be forced.",
    ),
    NotShown(
        "B10",
        "A compile rewinds the generator of a GPU that another thread draws from",
        "`preserve_global_state` saves that of the compiling thread's current GPU. The guard leaves it as it is: Inductor "
        "draws from it when it tunes kernels, which must be undone, and what others drew cannot be told from that. One GPU for "
        "each thread, made current (`Worker(device=)`), is safe. Two threads on one GPU were not tried.",
    ),
    NotShown(
        "E2",
        "Inductor's own autotuner (`CachingAutotuner`) at a first launch in two threads",
        "Entry E2 shows Triton's. Inductor's chooses among the launchers that it found when it began and puts a list of one in "
        "place of the rest, with no lock: two threads that come at once both measure, and either choice is a right kernel. "
        "Read in 2.9.1, 2.11, 2.13 and 2.14.1: no order of the two was found that ends in an error or a wrong kernel. What is "
        "left is time, and measurements that the other thread's kernels disturb: call each compiled function once, forward and "
        "backward, before the threads start (`warmup`).",
    ),
    NotShown(
        "E1",
        "A compiled call of one thread begins a new generation of CUDA graphs for another (`GenerationTracker`)",
        "Entry E1 shows the step mark. The generation that graph trees compare is one counter too, which each compiled call of "
        "any thread raises. A per-thread count would cost every warm call; mark the steps (`cudagraph_mark_step_begin`), "
        "which under the guard are the thread's own: the counter is then not asked.",
    ),
    NotShown(
        "E5",
        "A compile slows every other thread, and a kernel launch that holds the GIL waits for a collective",
        "Not a fault that a trigger can tell from a slow machine; the guard's statistics have the waits for the compile lock. "
        "The collective's deadlock (pytorch#109074) needs two GPUs and NCCL, and was not tried.",
    ),
    NotShown(
        "E6",
        "Two threads register Inductor's backends (`init_backend_registration`) or devices (`init_device_reg`) at once",
        "Read in all four: each device is asked for by itself and registered twice with one value; two at once end as one.",
    ),
    NotShown(
        "E7",
        "Two threads write one entry of a cache on disk",
        "`codecache.write_atomic` writes to a name with process and thread in it and renames: read in all four. What was "
        "reported came from shared file systems (pytorch#162432).",
    ),
    NotShown(
        "E8",
        "`torch._dynamo.callback` runs nothing for a second compile that begins before the first has ended",
        "True, and by design a matter for who writes such callbacks; no program loses by it. The guard does not use them.",
    ),
    NotShown(
        "F1",
        "A plain `nn.Module` built in one thread while another builds a model of transformers",
        "It takes the other's default dtype, and nothing can tell that construction from one that means to: torch's default "
        "dtype is one for the process, and reading it is not seen. Hold `compile_guard.exclusive()` while building it: models "
        "of transformers are built under the same lock.",
    ),
)
