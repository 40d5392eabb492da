"""The trace lock: who holds it, for what, who waits, and what an interrupt leaves behind."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from compile_guard import waits
from compile_guard.findings import Findings, GuardError, findings
from compile_guard.trace_lock import ABANDONED_S, TraceLock, _Hold
from compile_guard.waits import DeadlockError
from tests.threads import Puppet, run_in_threads, until, wait

MakePuppet = Callable[[], Puppet]


@pytest.fixture
def lock() -> TraceLock:
    return TraceLock("a lock under test")


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(findings, "mode", "record")
    findings.clear()
    yield
    findings.clear()


def is_free(lock: TraceLock) -> bool:
    """Whether nobody holds the lock, nor its core."""

    def take_core() -> bool:
        return lock.core.acquire(blocking=False) and (lock.core.release() or True)

    return lock.owner is None and bool(run_in_threads(take_core)[0])


def waits_for(lock: TraceLock, thread: Puppet) -> None:
    until(lambda: thread.ident in waits.waiting(), f"a wait of {thread.ident} for {lock!r}")


def test_owner_is_the_thread_that_holds_it_and_none_when_free(lock: TraceLock) -> None:
    assert lock.owner is None
    with lock.hold("a trace"):
        assert lock.owner == threading.get_ident()
        assert lock.owned()
        assert run_in_threads(lock.owned) == [False]
    assert lock.owner is None


def test_owner_may_take_it_again_and_frees_it_with_the_last_release(lock: TraceLock) -> None:
    for _ in range(3):
        assert lock.acquire()
    for depth in (3, 2, 1):
        assert lock.depth == depth
        assert not is_free(lock)
        lock.release()
    assert is_free(lock)


def test_other_threads_wait_until_the_holder_lets_go(lock: TraceLock, puppet: MakePuppet) -> None:
    second = puppet()
    with lock.hold("the first trace"):
        task = second.start(lock.acquire, "the second trace")
        waits_for(lock, second)
        assert not task.done
    assert task.result() is True
    assert lock.owner == second.ident
    second.do(lock.release)


def test_acquire_gives_up_after_its_timeout(lock: TraceLock, puppet: MakePuppet) -> None:
    with lock.hold("a trace"):
        assert puppet().do(lock.acquire, "in vain", timeout=0.01) is False
        assert puppet().do(lock.acquire, "in vain", timeout=0) is False
    assert is_free(lock)
    assert lock.statistics().num_waiting == 0


def test_statistics_count_outermost_acquisitions_and_waits(lock: TraceLock, puppet: MakePuppet) -> None:
    second = puppet()
    with lock.hold("outer"), lock.hold("inner"):
        task = second.start(lock.acquire, "next")
        waits_for(lock, second)
        now = lock.statistics()
        assert (now.owner, now.depth, now.doing) == (threading.get_ident(), 2, "inner")
        assert (now.num_waiting, now.num_acquired, now.num_contended) == (1, 1, 1)
    task.result()
    second.do(lock.release)
    after = lock.statistics()
    assert (after.owner, after.depth, after.doing, after.num_waiting) == (None, 0, None, 0)
    assert (after.num_acquired, after.num_contended) == (2, 1)
    assert after.waited_s > 0


def test_repr_names_the_owner_what_it_does_and_how_many_wait(lock: TraceLock, puppet: MakePuppet) -> None:
    assert repr(lock) == "<TraceLock 'a lock under test' free, 0 waiting>"
    holder, waiter = puppet(), puppet()
    holder.do(lock.acquire, "torch.export")
    task = waiter.start(lock.acquire, "make_fx")
    waits_for(lock, waiter)
    assert repr(lock) == "<TraceLock 'a lock under test' held 1x by puppet-0 for torch.export, 1 waiting>"
    holder.do(lock.release)
    task.result()
    waiter.do(lock.release)


def test_repr_tells_a_core_that_somebody_holds_directly(lock: TraceLock, puppet: MakePuppet) -> None:
    with lock.core:  # type: ignore[attr-defined]
        waiter = puppet()
        task = waiter.start(lock.acquire)
        waits_for(lock, waiter)
        assert "held outside compile_guard, 1 waiting" in repr(lock)
    task.result()
    waiter.do(lock.release)


def test_code_that_took_the_core_by_value_excludes_users_of_the_lock(lock: TraceLock) -> None:
    with lock.core:  # type: ignore[attr-defined]
        assert not is_free(lock)
        assert lock.acquire()  # the same thread, which holds the core already
        lock.release()
        assert not is_free(lock)
    assert is_free(lock)


def test_release_by_a_thread_that_does_not_own_it_raises(lock: TraceLock) -> None:
    with pytest.raises(GuardError, match="does not own it"):
        lock.release()
    with lock.hold("a trace"), pytest.raises(GuardError, match="does not own it"):
        run_in_threads(lock.release)
    assert is_free(lock)


def test_hold_lets_go_when_its_block_raises(lock: TraceLock) -> None:
    with pytest.raises(KeyError), lock.hold("a trace"):
        raise KeyError
    assert is_free(lock)


def test_describe_renames_what_the_owner_does_and_ignores_others(lock: TraceLock) -> None:
    lock.describe("nothing")
    with lock.hold("a compile"):
        lock.describe("a compile of f")
        run_in_threads(lambda: lock.describe("of somebody else"))
        assert lock.doing == "a compile of f"
    assert lock.doing is None


def test_entered_and_leaving_run_once_around_the_outermost_hold(lock: TraceLock) -> None:
    seen: list[tuple[str, bool]] = []

    def entered() -> Callable[[], None]:
        seen.append(("entered", lock.core._is_owned()))
        return lambda: seen.append(("leaving", lock.core._is_owned()))

    lock.entered = entered
    with lock.hold("outer"), lock.hold("inner"):
        assert seen == [("entered", True)]
    assert seen == [("entered", True), ("leaving", True)]


def test_leaving_that_raises_leaves_the_lock_free(lock: TraceLock) -> None:
    def leaving() -> None:
        raise OSError("a hook that fails")

    lock.entered = lambda: leaving
    lock.acquire()
    with pytest.raises(OSError, match="a hook that fails"):
        lock.release()
    assert is_free(lock)
    assert lock.owner is None


def test_entered_that_raises_leaves_the_lock_free(lock: TraceLock) -> None:
    def entered() -> Callable[[], None]:
        raise OSError("a hook that fails")

    lock.entered = entered
    with pytest.raises(OSError, match="a hook that fails"):
        lock.acquire()
    lock.entered = None
    assert is_free(lock)
    assert lock.owner is None


# ----------------------------------------------------------------------------------------------------------- interrupts


class InterruptingCore:
    """A core that is interrupted just before, or just after, it is taken."""

    def __init__(self, when: str) -> None:
        self._real = threading.RLock()
        self._when = when
        self.armed = True

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        armed = self.armed and (blocking == ("blocking" in self._when))
        if armed:
            self.armed = False
            if "before" in self._when:
                raise KeyboardInterrupt
        taken = self._real.acquire(blocking, timeout)
        if armed and taken:
            raise KeyboardInterrupt
        return taken

    def release(self) -> None:
        self._real.release()

    def _is_owned(self) -> bool:
        return bool(self._real._is_owned())  # type: ignore[attr-defined]

    def _release_save(self) -> Any:
        return self._real._release_save()  # type: ignore[attr-defined]

    def _at_fork_reinit(self) -> None:
        self._real._at_fork_reinit()  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_around_the_core_of_a_free_lock_leaves_it_free(when: str) -> None:
    lock = TraceLock("interrupted", InterruptingCore(when))
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert lock.owner is None
    assert lock.depth == 0
    assert is_free(lock)


@pytest.mark.parametrize("when", ["before blocking", "after blocking"])
def test_interrupt_of_a_waiter_leaves_the_lock_to_the_others(when: str, puppet: MakePuppet) -> None:
    core = InterruptingCore(when)
    lock = TraceLock("interrupted", core)
    holder, waiter = puppet(), puppet()
    holder.do(lock.acquire)
    task = waiter.start(lock.acquire)
    if when == "before blocking":
        with pytest.raises(KeyboardInterrupt):
            task.result()
        assert lock.owner == holder.ident
    else:
        waits_for(lock, waiter)
    holder.do(lock.release)
    with pytest.raises(KeyboardInterrupt):
        task.result()
    assert waiter.ident not in waits.waiting()
    assert lock.statistics().num_waiting == 0
    assert is_free(lock)


def interrupted_at(number: int, function: Callable[[], Any], within: set[Any]) -> bool:
    """Call `function` with a KeyboardInterrupt at the `number`th place in the code objects `within` where a signal is seen.

    That is after a call of something written in C; a trace function stands in for the signal.

    Returns:
        Whether there was such a place.
    """
    after_a_call = {
        code: {
            following.offset
            for call, following in itertools.pairwise(dis.get_instructions(code))
            if call.opname.startswith("CALL")
        }
        for code in within
    }
    remaining = number
    hit = False
    called_python: set[FrameType] = set()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal remaining, hit
        if event == "call" and frame.f_back is not None:
            called_python.add(frame.f_back)
        if frame.f_code not in within:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not hit and frame.f_lasti in after_a_call[frame.f_code]:
            if frame in called_python:
                called_python.discard(frame)
                return trace
            remaining -= 1
            if remaining == 0:
                hit = True
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(outer)
    return hit


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_interrupt_after_any_call_in_acquire_leaves_the_depth_as_it_was(lock: TraceLock, depth: int) -> None:
    balance = 0

    def entered() -> Callable[[], None]:
        nonlocal balance
        balance += 1

        def leaving() -> None:
            nonlocal balance
            balance -= 1

        return leaving

    lock.entered = entered
    for _ in range(depth):
        lock.acquire("before")
    number = 0
    while True:
        number += 1
        hit = interrupted_at(number, lambda: lock.acquire("interrupted"), {TraceLock.acquire.__code__})
        if not hit:
            lock.release()
        assert lock.depth == depth, f"interrupted at place {number}"
        assert balance == bool(depth)
        assert lock.owned() == bool(depth)
        assert is_free(lock) == (not depth)
        if not hit:
            break
    for _ in range(depth):
        lock.release()
    assert is_free(lock)


def test_interrupt_after_any_call_in_a_hold_inside_a_hold_is_undone_by_the_outer_one(lock: TraceLock) -> None:
    codes = {TraceLock.acquire.__code__, TraceLock._let_go.__code__, TraceLock.owned.__code__}

    def nested() -> None:
        with lock.hold("outer"), lock.hold("inner"):
            pass

    number = 0
    hit = True
    while hit:
        number += 1
        hit = interrupted_at(number, nested, codes)
        assert lock.depth == 0, f"interrupted at place {number}"
        assert is_free(lock)


def test_interrupt_while_letting_go_frees_the_lock_all_the_same(lock: TraceLock) -> None:
    def leaving() -> None:
        raise KeyboardInterrupt

    lock.entered = lambda: leaving
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    lock.entered = None
    assert lock.owner is None
    assert lock.depth == 0
    assert is_free(lock)


def interrupted_on_entering(code: CodeType, function: Callable[[], None]) -> None:
    """Call `function` with a KeyboardInterrupt on the first instruction of `code`, where Python looks for signals as well."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "call" and frame.f_code is code:
            sys.settrace(None)
            raise KeyboardInterrupt
        return None

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            function()
    finally:
        sys.settrace(outer)


@pytest.mark.parametrize(
    ("how", "place"),
    [
        *itertools.product(["hold"], [_Hold.__exit__, TraceLock.release, TraceLock._let_go]),
        *itertools.product(["with"], [TraceLock.__exit__, TraceLock.release, TraceLock._let_go]),
        *itertools.product(["nested"], [_Hold.__exit__, TraceLock.release, TraceLock.__exit__, TraceLock._let_go]),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__qualname__,
)
@pytest.mark.parametrize("who", ["the same thread", "another thread"])
def test_a_hold_whose_exit_never_ran_is_ended_by_whoever_comes_next(
    lock: TraceLock, how: str, place: Callable[..., Any], who: str, puppet: MakePuppet
) -> None:
    """`with` calls `__exit__` once: when Ctrl-C strikes on its first instruction, nothing gives the lock back."""
    calls: list[int] = []
    lock.entered = lambda: functools.partial(calls.append, threading.get_ident())

    def hold() -> None:
        if how == "hold":
            with lock.hold("a trace"):
                pass
        elif how == "with":
            with lock:
                pass
        else:
            with lock, lock.hold("inner"):
                pass

    interrupted_on_entering(place.__code__, hold)
    if who == "another thread":
        # It waits one slice at most, then sees that the frame has returned.
        assert puppet().do(functools.partial(lock.acquire, "a later trace", ABANDONED_S * 20))
    assert lock.acquire("a later trace", timeout=0 if who == "another thread" else None) == (who == "the same thread")
    assert lock.depth == 1
    assert lock.doing == "a later trace"
    if who == "the same thread":
        lock.release()
        assert is_free(lock)
        # What the interrupted exit had still to call was called, and that of the later hold.
        assert calls == [threading.get_ident()] * 2


def test_a_hold_is_not_abandoned_while_its_frame_runs_however_long_others_wait(
    lock: TraceLock, puppet: MakePuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[TraceLock.__module__], "ABANDONED_S", 0.001)
    inside, go_on = threading.Event(), threading.Event()

    def holds() -> int:
        with lock.hold("a long trace"):
            inside.set()
            assert go_on.wait(60)
            return lock.depth

    holder = puppet()
    task = holder.start(holds)
    assert inside.wait(60)
    assert not puppet().do(functools.partial(lock.acquire, "impatient", 0.2))
    assert lock.owner == holder.ident
    go_on.set()
    assert task.result() == 1
    assert is_free(lock)


def test_a_hold_of_a_generator_that_stands_at_its_yield_is_not_abandoned(lock: TraceLock, puppet: MakePuppet) -> None:
    def holds() -> Iterator[None]:
        with lock.hold("a generator's trace"):
            yield

    generator = holds()
    next(generator)
    assert not puppet().do(functools.partial(lock.acquire, "impatient", ABANDONED_S * 1.5))
    assert list(generator) == []
    assert is_free(lock)


# ---------------------------------------------------------------------------------------------------------------- waits


def test_a_wait_is_recorded_with_its_subject_and_its_holder_and_ends(lock: TraceLock, puppet: MakePuppet) -> None:
    waiter = puppet()
    with lock.hold("a trace"):
        task = waiter.start(lock.acquire)
        waits_for(lock, waiter)
        wait_now = waits.waiting()[waiter.ident]
        assert wait_now.subject == "a lock under test"
        assert wait_now.holders() == {threading.get_ident()}
    task.result()
    waiter.do(lock.release)
    assert waiter.ident not in waits.waiting()


def test_two_locks_taken_in_both_orders_raise_in_the_thread_that_would_close_the_cycle(puppet: MakePuppet) -> None:
    one, two = TraceLock("one"), TraceLock("two")
    a, b = puppet(), puppet()
    a.do(one.acquire)
    b.do(two.acquire)
    waiting = a.start(two.acquire)
    waits_for(two, a)
    with pytest.raises(DeadlockError, match=r"puppet-1 would wait for one for ever: puppet-0 -> puppet-1"):
        b.do(one.acquire)
    assert b.ident not in waits.waiting()
    b.do(two.release)
    assert waiting.result() is True
    a.do(two.release)
    a.do(one.release)
    assert is_free(one)
    assert is_free(two)


def test_a_cycle_through_three_threads_raises(puppet: MakePuppet) -> None:
    locks = [TraceLock(str(number)) for number in range(3)]
    threads = [puppet() for _ in locks]
    for thread, held in zip(threads, locks, strict=True):
        thread.do(held.acquire)
    tasks = []
    for number in (0, 1):
        tasks.append(threads[number].start(locks[number + 1].acquire))
        waits_for(locks[number + 1], threads[number])
    with pytest.raises(DeadlockError, match="puppet-0 -> puppet-1 -> puppet-2"):
        threads[2].do(locks[0].acquire)
    threads[2].do(locks[2].release)
    assert tasks[1].result() is True
    threads[1].do(locks[2].release)
    threads[1].do(locks[1].release)
    assert tasks[0].result() is True


def test_a_chain_that_is_no_cycle_is_waited_for(puppet: MakePuppet) -> None:
    one, two = TraceLock("one"), TraceLock("two")
    a, b, c = puppet(), puppet(), puppet()
    a.do(one.acquire)
    b.do(two.acquire)
    first = b.start(one.acquire)
    waits_for(one, b)
    second = c.start(two.acquire)
    waits_for(two, c)
    a.do(one.release)
    assert first.result() is True
    b.do(one.release)
    b.do(two.release)
    assert second.result() is True
    c.do(two.release)


def test_a_stalled_wait_is_reported_with_both_stacks_and_goes_on(
    lock: TraceLock, puppet: MakePuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STALL_S", 0.02)
    holder, waiter = puppet(), puppet()
    let_go, holding = threading.Event(), threading.Event()

    def hold_on() -> None:
        with lock.hold("a long trace"):
            holding.set()
            wait(let_go)

    def wait_for_it() -> None:
        with lock.hold("a trace"):
            pass

    held = holder.start(hold_on)
    wait(holding)
    task = waiter.start(wait_for_it)
    stall = until(lambda: [found for found in findings() if found.code == "stall"], "a stall")[0]
    assert stall.subject == "a lock under test"
    assert not stall.prevented
    assert stall.now.thread == "puppet-1"
    assert any("in wait_for_it" in row for row in stall.now.stack)
    assert stall.other is not None
    assert stall.other.thread == "puppet-0"
    assert any("in hold_on" in row for row in stall.other.stack)
    assert not task.done
    until(lambda: findings()[0].count > 1, "a second report of the same stall")
    let_go.set()
    held.result()
    task.result()


def test_a_stalled_waiter_raises_in_mode_raise_and_the_lock_is_not_broken(
    lock: TraceLock, puppet: MakePuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STALL_S", 0.02)
    monkeypatch.setattr(findings, "mode", "raise")
    holder, waiter = puppet(), puppet()
    holder.do(lock.acquire, "a long trace")
    from compile_guard.findings import FindingError

    with pytest.raises(FindingError) as caught:
        waiter.do(lock.acquire)
    assert caught.value.finding.code == "stall"
    assert lock.owner == holder.ident
    assert waiter.ident not in waits.waiting()
    holder.do(lock.release)
    assert is_free(lock)


def test_a_wait_with_a_timeout_shorter_than_a_stall_reports_nothing(lock: TraceLock, puppet: MakePuppet) -> None:
    with lock.hold("a trace"):
        assert puppet().do(lock.acquire, timeout=0.02) is False
    assert findings() == []
    assert isinstance(findings, Findings)


def test_many_threads_that_take_turns_never_overlap(lock: TraceLock) -> None:
    inside = 0

    def work() -> None:
        nonlocal inside
        for _ in range(200):
            with lock.hold("work"), lock.hold("inner work"):
                inside += 1
                assert inside == 1
                inside -= 1

    run_in_threads(*[work] * 6)
    assert lock.statistics().num_acquired == 1200
    assert is_free(lock)
