"""The trace lock against a model of twenty lines: any order of calls by four threads, forced one step at a time."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compile_guard import waits
from compile_guard.findings import GuardError
from compile_guard.trace_lock import TraceLock
from tests.threads import Puppet, Task, until

NUM_THREADS = 4
a_thread = st.integers(0, NUM_THREADS - 1)


class Model:
    """A lock with an owner, as simple as it gets: who holds it, for what, and how often it was taken."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.doing: list[str] = []
        self.num_acquired = 0

    def acquire(self, thread: int, what: str) -> bool:
        if self.owner not in (None, thread):
            return False
        self.num_acquired += self.owner is None
        self.owner = thread
        self.doing.append(what)
        return True

    def release(self, thread: int) -> bool:
        if self.owner != thread:
            return False
        self.doing.pop()
        if not self.doing:
            self.owner = None
        return True


class LockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.balance = 0
        self.lock = TraceLock("the lock", entered=self._entered)
        self.model = Model()
        self.threads = [Puppet(f"thread-{number}") for number in range(NUM_THREADS)]
        self.pending: dict[int, tuple[Task, str]] = {}

    def _entered(self) -> Any:
        self.balance += 1
        return self._left

    def _left(self) -> None:
        self.balance -= 1

    def _free(self, thread: int) -> bool:
        return thread not in self.pending

    @rule(thread=a_thread, what=st.sampled_from(["a compile", "a trace", "an export"]))
    def try_to_acquire(self, thread: int, what: str) -> None:
        if self._free(thread):
            taken = self.threads[thread].do(self.lock.acquire, what, timeout=0)
            assert taken is self.model.acquire(thread, what)

    @rule(thread=a_thread, what=st.sampled_from(["a waiting compile", "a waiting trace"]))
    def acquire_and_wait(self, thread: int, what: str) -> None:
        if not self._free(thread):
            return
        task = self.threads[thread].start(self.lock.acquire, what)
        if self.model.acquire(thread, what):
            assert task.result() is True
        else:
            until(lambda: self.threads[thread].ident in waits.waiting(), f"the wait of thread {thread}")
            self.pending[thread] = (task, what)

    @rule(thread=a_thread)
    def release(self, thread: int) -> None:
        if not self._free(thread):
            return
        try:
            self.threads[thread].do(self.lock.release)
            released = True
        except GuardError:
            released = False
        assert released is self.model.release(thread)
        self._hand_over()

    def _hand_over(self) -> None:
        """A free lock goes to one of those who wait for it; which one is nobody's promise."""
        if self.model.owner is not None or not self.pending:
            return
        next_one = until(lambda: [each for each, (task, _) in self.pending.items() if task.done], "the next owner")[0]
        task, what = self.pending.pop(next_one)
        assert task.result() is True
        assert self.model.acquire(next_one, what)

    @precondition(lambda self: self.model.owner is not None)
    @rule(what=st.text(min_size=1, max_size=4))
    def describe(self, what: str) -> None:
        owner = self.model.owner
        assert owner is not None
        self.threads[owner].do(self.lock.describe, what)
        self.model.doing[-1] = what

    @rule(thread=a_thread)
    def hold_that_fails(self, thread: int) -> None:
        if not self._free(thread) or self.model.owner not in (None, thread):
            return

        def fail() -> None:
            try:
                with self.lock.hold("what fails"):
                    raise KeyError
            except KeyError:
                pass

        self.threads[thread].do(fail)
        self.model.num_acquired += self.model.owner is None
        self._hand_over()

    @invariant()
    def agrees_with_the_model(self) -> None:
        owner = self.model.owner
        assert self.lock.owner == (None if owner is None else self.threads[owner].ident)
        assert self.lock.depth == len(self.model.doing)
        assert self.lock.doing == (self.model.doing[-1] if self.model.doing else None)
        seen = self.lock.statistics()
        assert seen.num_acquired == self.model.num_acquired
        assert seen.num_waiting == len(self.pending)
        assert self.balance == (owner is not None)
        waiting = waits.waiting()
        for number, thread in enumerate(self.threads):
            assert (thread.ident in waiting) == (number in self.pending)

    def teardown(self) -> None:
        while self.model.owner is not None:
            owner = self.model.owner
            self.threads[owner].do(self.lock.release)
            self.model.release(owner)
            self._hand_over()
        for thread in self.threads:
            thread.end()


LockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderOfCallsAgreesWithTheModel = LockMachine.TestCase
