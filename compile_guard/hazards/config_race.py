"""C1: two threads patch one configuration value; each puts back what it found, and one value stays for ever (up to 2.11)."""

from __future__ import annotations

import threading

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.configuration import config_is_global

    if config_is_global():
        return Affected(True, "config values are attributes of the process, which `config.patch` saves and puts back")
    return Affected(False, "config values are ContextVars: each thread patches its own")


def overlapping_blocks() -> str | None:
    """The first block to begin is the first to end."""
    import torch

    config = torch._dynamo.config
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    before: int = config.recompile_limit

    def first() -> int:
        with config.patch(recompile_limit=64):
            first_in.set()
            wait(second_in)
            limit: int = config.recompile_limit
        first_out.set()
        return limit

    def second() -> int:
        wait(first_in)
        with config.patch(recompile_limit=32):
            second_in.set()
            wait(first_out)
            limit: int = config.recompile_limit
        return limit

    limits = run_threads(first=first, second=second)
    said = []
    if limits != {"first": 64, "second": 32}:
        said.append(f"recompile_limit patched to 64 and 32 in two threads was {limits['first']} and {limits['second']} there")
    if config.recompile_limit != before:
        said.append(f"with both blocks over it is {config.recompile_limit} for good, not {before}")
    return "; ".join(said) or None


def one_block_in_two_threads() -> str | None:
    """A patch made once, as a decorator makes it, is entered by two threads."""
    import torch

    block = torch._dynamo.config.patch(cache_size_limit=16)
    entered, refused = threading.Event(), threading.Event()

    def first() -> None:
        with block:
            entered.set()
            wait(refused)

    def second() -> str | None:
        wait(entered)
        try:
            with block:
                return None
        except AssertionError as error:
            return f"a patch that two threads enter raised AssertionError: {str(error) or 'no message'}"
        finally:
            refused.set()

    said: str | None = run_threads(first=first, second=second)["second"]
    return said


def trigger() -> str | None:
    said = [one_block_in_two_threads(), overlapping_blocks()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    config = torch._dynamo.config
    before = config.recompile_limit
    over = threading.Event()

    def first() -> None:
        with config.patch(recompile_limit=64), config.patch(recompile_limit=32):
            if config.recompile_limit != 32:
                raise AssertionError("the inner of two nested patches is not in force")
        over.set()

    def second() -> None:
        wait(over)
        with config.patch(recompile_limit=16):
            if config.recompile_limit != 16:
                raise AssertionError("a patch after another thread's is not in force")

    run_threads(first=first, second=second)
    if config.recompile_limit != before:
        raise AssertionError(f"patches that are over left recompile_limit at {config.recompile_limit}")


HAZARD = Hazard(
    id="C1",
    name="config_race",
    title="Config patches of two threads undo each other, and one stays",
    symptom=(
        "A bare `AssertionError` out of `ConfigPatch.__enter__`; a limit or switch that is not what the `with` block set; "
        "a recompile limit of `sys.maxsize`, or another thread's value, for the rest of the run."
    ),
    mechanism=(
        "Up to 2.11 a configuration value belongs to the process. `config.patch`, and the contexts that eager "
        "flex_attention enters (`_set_compilation_env`, `disable_cache_limit`), save it, assign, and put back what they "
        "saved, which may be another thread's patch. A patch object keeps what it saved in itself, so that two threads "
        "cannot enter it."
    ),
    links=("pytorch#111150", "pytorch#118260", "pytorch#118387", "pytorch#173568"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("config_patches", "dynamic_config"),
    finding="config-race",
    fix="Install the guard, or use torch 2.12 or newer; else set the configuration once, before the threads start.",
)
