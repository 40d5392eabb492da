"""A `with set_stance(...)` block acts for its own thread; a plain call acts for the process, and is told where it surprises."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import compile_guard
from compile_guard.hazards.stance import compiled_and_ran
from tests.threads import run_in_threads, wait

x = torch.ones(4)


def runs_compiled(step: Any, ran: list[bool]) -> bool:
    ran.clear()
    step(x)
    return bool(ran)


@pytest.fixture
def ran() -> list[bool]:
    return []


@pytest.fixture
def step(guard: Any, ran: list[bool]) -> Any:
    return compiled_and_ran(ran)


def test_block_acts_inside_and_not_after(step: Any, ran: list[bool]) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert not runs_compiled(step, ran)
        with torch.compiler.set_stance("default"):
            assert runs_compiled(step, ran)
        assert not runs_compiled(step, ran)
    assert runs_compiled(step, ran)
    assert compile_guard.findings() == []


def test_decorated_function_has_the_stance(step: Any, ran: list[bool]) -> None:
    @torch.compiler.set_stance("force_eager")
    def eager() -> bool:
        return runs_compiled(step, ran)

    assert not eager()
    assert runs_compiled(step, ran)


def test_plain_call_acts_for_the_process_until_the_next(step: Any, ran: list[bool]) -> None:
    torch.compiler.set_stance("force_eager")
    try:
        assert not runs_compiled(step, ran)
        assert compile_guard.findings() == []  # this thread has asked for it
        assert run_in_threads(lambda: runs_compiled(step, ran)) == [False]
    finally:
        torch.compiler.set_stance("default")
    assert runs_compiled(step, ran)
    (found,) = compile_guard.findings()
    assert (found.code, found.subject, found.count) == ("eager-call", "step", 1)
    assert "thread MainThread has set the stance force_eager for the process" in found.shared


def test_object_made_by_a_call_and_entered_later_leaves_what_was_before(step: Any, ran: list[bool]) -> None:
    block = torch.compiler.set_stance("force_eager")
    assert not runs_compiled(step, ran)
    for _ in range(2):
        with block:
            assert not runs_compiled(step, ran)
        assert runs_compiled(step, ran)


def test_plain_call_in_another_thread_holds_beside_a_block(step: Any, ran: list[bool]) -> None:
    inside, done = threading.Event(), threading.Event()

    def holds() -> bool:
        with torch.compiler.set_stance("default"):
            inside.set()
            wait(done)
            return runs_compiled(step, ran)

    def sets() -> bool:
        wait(inside)
        torch.compiler.set_stance("force_eager")
        done.set()
        return True

    try:
        assert run_in_threads(holds, sets) == [True, True]
        assert not runs_compiled(step, ran)
    finally:
        torch.compiler.set_stance("default")
    assert runs_compiled(step, ran)


def test_block_is_never_in_force_for_others_on_its_way_in(guard: Any) -> None:
    from torch._dynamo import decorators, eval_frame

    seen = []
    enter = decorators.set_stance.__enter__

    def looks(self: Any) -> None:
        seen.append(run_in_threads(lambda: eval_frame._stance.stance)[0])
        enter(self)

    decorators.set_stance.__enter__ = looks
    try:
        with torch.compiler.set_stance("force_eager"):
            pass
        torch.compiler.set_stance("force_eager")(lambda: None)()
    finally:
        decorators.set_stance.__enter__ = enter
    assert seen == ["default", "default"]


def test_refused_inside_a_compiled_region_as_in_bare_torch(guard: Any) -> None:
    def enters(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.set_stance("force_eager")
        return x

    with pytest.raises(Exception, match="set_stance"):
        torch.compile(enters, backend="eager", fullgraph=True)(x)


def test_uninstall_leaves_the_stance_of_the_process(clean: None) -> None:
    from torch._dynamo import eval_frame

    compile_guard.install("record")
    torch.compiler.set_stance("eager_on_recompile")
    compile_guard.uninstall()
    try:
        assert isinstance(eval_frame._stance, eval_frame.DynamoStance)
        assert eval_frame._stance.stance == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")
