"""From shards to drafters: a reader thread, target threads, bounded channels, drafter threads.

Micro-batch n of a step goes to drafter n mod G, of the G drafters of all hosts. Targets take micro-batches in the order
in which the reader makes them and may finish in another; channels put them back in order. Nothing polls: a thread waits
on a condition, and stopping the crew wakes it.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from compile_guard import Worker
from dflash_train.anchors import Anchors, draw_anchors
from dflash_train.config import ConfigError, RunConfig
from dflash_train.packing import PackedDocuments, PackedRows, RowSampler
from dflash_train.targets import TargetStates

T = TypeVar("T")
JOIN_S = 30.0
"""How long threads have to end once the crew is stopped."""


class Stopped(Exception):
    """The crew is stopped: raised in whatever thread waits, which ends."""


class Clock:
    """Where a thread's time goes: seconds by kind (`compute`, `wait`, `copy`, `sync`), and the latest spans for a timeline."""

    MAX_SPANS = 50_000

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident = 0
        self.now = ""
        """Kind of the block that the thread is in; empty between blocks."""
        # All kinds from the start: others read while this thread counts.
        self.seconds = dict.fromkeys(("compute", "wait", "copy", "sync"), 0.0)
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Count the block as this kind of time."""
        began = time.perf_counter()
        self.now = kind
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.now = ""
            self.seconds[kind] += ended - began
            if len(self.spans) < self.MAX_SPANS:
                self.spans.append((kind, began, ended))

    def share(self, kind: str) -> float:
        """Part of the counted time that is of a kind."""
        return self.seconds[kind] / max(1e-9, sum(self.seconds.values()))


class Crew:
    """The threads of a run. The first that fails stops the others, and its exception reaches the caller of `join`."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self.failed: str | None = None
        """Name of the thread that failed first."""
        self.clocks: list[Clock] = []
        self._workers: list[Worker] = []
        self._on_stop: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._num_running = 0
        self._all_ended = threading.Event()

    def add(self, name: str, device: torch.device, run: Callable[[Clock], None]) -> None:
        """Add a thread that runs `run`; its clock is passed in."""
        clock = Clock(name)
        self.clocks.append(clock)
        self._workers.append(Worker(self._run, device=device, args=(name, clock, run), name=name, daemon=True))

    def _run(self, name: str, clock: Clock, run: Callable[[Clock], None]) -> None:
        clock.ident = threading.get_native_id()
        try:
            run(clock)
        except Stopped:
            self.stop()
        except BaseException as error:  # handed on to `join`
            self.stop(name, error)
        finally:
            with self._lock:
                self._num_running -= 1
                ended = self._num_running == 0
            if ended:
                self._all_ended.set()

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the crew is stopped; it must end what threads wait for."""
        self._on_stop.append(wake)

    def start(self) -> None:
        """Start all threads."""
        self._num_running = len(self._workers)
        for worker in self._workers:
            worker.start()

    def stop(self, name: str | None = None, cause: BaseException | None = None) -> None:
        """Wake and end all threads; the first cause given is the cause."""
        with self._lock:
            if self.cause is None and cause is not None:
                self.cause, self.failed = cause, name
            if self._stopped:
                return
            self._stopped = True
        for wake in self._on_stop:
            wake()

    @property
    def stopped(self) -> bool:
        """Whether the threads were told to end."""
        return self._stopped

    def wait(self, seconds: float) -> bool:
        """Wait until all threads have ended, at most so long; whether they have."""
        return self._all_ended.wait(seconds)

    def join(self) -> list[str]:
        """Wait for the threads of a stopped crew; the names of those that did not end in time, whose stacks are printed."""
        deadline = time.monotonic() + JOIN_S
        for worker in self._workers:
            if worker.ident is not None:
                worker.join(max(0.0, deadline - time.monotonic()))
        stuck = [worker.name for worker in self._workers if worker.is_alive()]
        if stuck:
            print(f"dflash-train: {', '.join(stuck)} did not end within {JOIN_S:.0f} s; all stacks:", file=sys.stderr)
            dump_stacks()
        return stuck


def dump_stacks() -> None:
    """Print the stacks of all threads."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


class Channel(Generic[T]):
    """A bounded queue of numbered items that come out in order 0, 1, 2 …, whatever order they are put in.

    It holds at most `depth` items, the next one among them: whoever brings that is never kept waiting.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: dict[int, T] = {}
        self._next = 0
        self._end: int | None = None
        self._closed = False
        self._changed = threading.Condition()

    def put(self, number: int, item: T) -> None:
        """Add an item, waiting for room.

        Raises:
            Stopped: the channel is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number < self._next + self._depth)
            if self._closed:
                raise Stopped
            self._items[number] = item
            self._changed.notify_all()

    def get(self) -> tuple[int, T] | None:
        """The next item with its number, waiting for it; None after the last one.

        Raises:
            Stopped: the channel is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next in self._items or self._next == self._end)
            if self._closed:
                raise Stopped
            number = self._next
            if number == self._end:
                return None
            self._next += 1
            self._changed.notify_all()
            return number, self._items.pop(number)

    def finish(self, end: int) -> None:
        """There will be no item from number `end` on."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all who wait, and drop what is held."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Meeting:
    """Threads that wait for each other; the last to arrive runs `action` while the others wait.

    Unlike `threading.Barrier`, a meeting takes place for all or for none: closing it does not part those who have met. It
    closes itself when its action fails, whose exception goes to the thread that ran it.
    """

    def __init__(self, parties: int, action: Callable[[], None]) -> None:
        self._parties = parties
        self._action = action
        self._arrived = 0
        self._number = 0
        self._acting = False
        self._closed = False
        self._changed = threading.Condition()

    def wait(self) -> None:
        """Meet the others.

        Raises:
            Stopped: closed before all had arrived, or the action failed in another thread.
        """
        with self._changed:
            if self._closed:
                raise Stopped
            number = self._number
            self._arrived += 1
            if self._arrived < self._parties:
                self._changed.wait_for(lambda: self._number != number or (self._closed and not self._acting))
                if self._number == number:
                    raise Stopped
                return
            self._acting = True
        met = False
        try:
            self._action()  # without the lock: `close` must not wait for it
            met = True
        finally:
            with self._changed:
                self._acting, self._arrived = False, 0
                if met:
                    self._number += 1
                else:
                    self._closed = True
                self._changed.notify_all()

    def close(self) -> None:
        """End the waits of a meeting that has not begun; there will be none after."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a drafter trains on at once."""

    step: int
    rows: PackedRows
    anchors: Anchors
    num_tokens: int
    """Tokens that are not padding."""
    states: TargetStates | None = None
    """None until a target has made them."""
    copied: torch.cuda.Event | None = None
    """When the copies to the drafter's GPU are done."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How many drafters there are, and which are here."""

    drafters_here: int
    hosts: int = 1
    rank: int = 0

    @property
    def drafters(self) -> int:
        """G, drafters of all hosts."""
        return self.drafters_here * self.hosts


class Source:
    """The micro-batches of this host, as a pure function of the step.

    Args:
        data: the rows.
        config: of the run.
        topology: who reads what.
        first_step: step at which reading begins.
        first_place: its place in the endless order of rows: the data cursor.
    """

    def __init__(
        self, data: PackedDocuments, config: RunConfig, topology: Topology, first_step: int = 0, first_place: int = 0
    ) -> None:
        self._data = data
        self._config = config
        self._topology = topology
        self._sampler = RowSampler(len(data), config.data.rows_per_batch, config.data.seed)
        self._first = (first_step, first_place)
        self.rows_per_step = config.data.rows_per_batch * config.train.accumulation * topology.drafters
        """Rows that all drafters together read in a step."""

    def __len__(self) -> int:
        """Micro-batches of this host from the first step to the last."""
        steps = max(0, self._config.train.steps - self._first[0])
        return steps * self._config.train.accumulation * self._topology.drafters_here

    def epoch(self, place: int) -> float:
        """Passes over the data completed before a place."""
        return place / len(self._data)

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of this host, on the CPU: for drafter `number` mod M of the M here."""
        here = self._topology.drafters_here
        step, within = divmod(number, self._config.train.accumulation * here)
        accumulated, drafter = divmod(within, here)
        slot = accumulated * self._topology.drafters + self._topology.rank * here + drafter
        per_batch = self._config.data.rows_per_batch
        place = self._first[1] + step * self.rows_per_step + slot * per_batch
        rows = self._data.batch(self._sampler.rows_from(place, per_batch))
        step += self._first[0]
        anchors = draw_anchors(
            rows.loss_mask,
            rows.documents,
            rows.document_numbers,
            per_document=self._config.anchors.per_document,
            per_row=self._config.anchors.per_row,
            seed=self._config.data.seed,
            step=step,
        )
        return Batch(step=step, rows=rows, anchors=anchors, num_tokens=int((rows.documents >= 0).sum()))


class StatesMaker(Protocol):
    """A target, or what stands for one."""

    @property
    def device(self) -> torch.device:
        """Where it makes states."""

    def states_of(self, rows: PackedRows) -> TargetStates:
        """The hidden states of rows on its device."""


class Pipeline:
    """Reader and target threads of a crew, and the channels to its drafters.

    Args:
        crew: gets the threads.
        source: the micro-batches.
        targets: one thread for each; the same target may stand there more than once.
        devices: one channel for each: the drafters' devices.
        dtype: in which drafters want the hidden states.
        prefetch: batches with hidden states held for each drafter.
    """

    def __init__(
        self,
        crew: Crew,
        source: Source,
        targets: Sequence[StatesMaker],
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        prefetch: int,
    ) -> None:
        self._source = source
        self._devices = devices
        self._dtype = dtype
        self._requests: Channel[Batch] = Channel(2 * len(targets))
        self.channels: list[Channel[Batch]] = [Channel(prefetch) for _ in devices]
        self.target_tokens = [0] * len(targets)
        """Tokens that each target thread has run."""
        for channel in (self._requests, *self.channels):
            crew.on_stop(channel.close)
        crew.add("reader", torch.device("cpu"), self._read)
        for i, target in enumerate(targets):
            crew.add(f"target-{i}", target.device, lambda clock, i=i, target=target: self._run_target(i, target, clock))  # type: ignore[misc]

    def _read(self, clock: Clock) -> None:
        for number in range(len(self._source)):
            with clock("compute"):
                batch = self._source.batch(number)
            with clock("wait"):
                self._requests.put(number, batch)
        self._requests.finish(len(self._source))

    def _run_target(self, index: int, target: StatesMaker, clock: Clock) -> None:
        while True:
            with clock("wait"):
                request = self._requests.get()
            if request is None:
                return
            number, batch = request
            drafter = number % len(self.channels)
            with clock("compute"):
                batch = with_states(batch, target)
            with clock("copy"):
                batch = hand_over(batch, self._devices[drafter], self._dtype)
            self.target_tokens[index] += batch.num_tokens
            with clock("wait"):
                self.channels[drafter].put(number // len(self.channels), batch)


def with_states(batch: Batch, target: StatesMaker) -> Batch:
    """The batch with its hidden states, on the target's device."""
    device = target.device
    if device.type != "cuda":
        rows = batch.rows.to(device)
    else:
        # A copy from the host waits until its stream is idle: on the stream that computes, for the forward before.
        side, stream = _side_stream(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(side):
            rows = batch.rows.to(device)
        stream.wait_stream(side)
        _keep_for(stream, rows)
    return replace(batch, states=target.states_of(rows))


_side_streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The calling thread's stream for copies on a GPU."""
    key = (threading.get_ident(), device)
    if key not in _side_streams:
        _side_streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[key]


def _keep_for(stream: torch.cuda.Stream, *holders: object) -> None:
    """Tell the allocator that tensors made on another stream are used on this one, so that their memory is not given away."""
    for holder in holders:
        for value in vars(holder).values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)


def hand_over(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch on a drafter's device.

    On a GPU all copies run on side streams, so that neither the target's next forward nor the drafter's step waits for
    them; `copied` tells when they are done.
    """
    states, anchors = batch.states, batch.anchors
    assert states is not None
    taps, final = states.taps.to(dtype), states.final.to(dtype)
    on_gpu = device.type == "cuda"
    there = _side_stream(device) if on_gpu else None
    with torch.cuda.stream(there):
        rows = batch.rows.to(device)
        anchors = replace(anchors, positions=anchors.positions.to(device), valid=anchors.valid.to(device))
    moved = replace(batch, rows=rows, anchors=anchors)
    if there is None:
        return replace(moved, states=TargetStates(taps=taps.to(device), final=final.to(device)))
    if taps.device != device:
        here = _side_stream(taps.device) if taps.is_cuda else None
        if here is not None:
            here.wait_stream(torch.cuda.current_stream(taps.device))
            for tensor in (taps, final):
                tensor.record_stream(here)
        # torch copies on the source's current stream and makes the destination's wait for it: both must be side streams.
        with torch.cuda.stream(here), torch.cuda.stream(there):
            taps, final = taps.to(device, non_blocking=True), final.to(device, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(there)
    return replace(moved, states=TargetStates(taps=taps, final=final), copied=copied)


def receive(batch: Batch, device: torch.device) -> TargetStates:
    """The hidden states; from here on the whole batch is safe to use on the calling thread's current stream."""
    assert batch.states is not None
    if batch.copied is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(batch.copied)
        _keep_for(stream, batch.rows, batch.anchors, batch.states)
    return batch.states


def parse_devices(text: str, role: str) -> list[torch.device]:
    """Devices as they are written: `0-4` and `0,2` are GPUs, else torch's names; repeats are logical devices of one.

    `auto`: without a GPU the CPU, with one that one for both roles, else about three drafters for five targets.

    Raises:
        ConfigError: no such device, or unreadable text.
    """
    role_name = f"train.{role}_devices"
    num_gpus = torch.cuda.device_count()
    if text == "auto":
        if num_gpus == 0:
            return [torch.device("cpu")]
        num_drafters = max(1, round(num_gpus * 3 / 8))
        first, last = (0, max(1, num_gpus - num_drafters)) if role == "target" else (num_gpus - num_drafters, num_gpus)
        return [torch.device("cuda", i) for i in range(first, last)]
    devices: list[torch.device] = []
    for part in text.split(","):
        name = part.strip()
        start, dash, stop = name.partition("-")
        try:
            if start.isdecimal() and (stop.isdecimal() if dash else True):
                span = range(int(start), int(stop if dash else start) + 1)
                devices += [torch.device("cuda", i) for i in span]
                found = len(span) > 0
            else:
                device = torch.device(name)
                # `cpu:1` is a second logical device of the same memory, which torch calls `cpu`.
                devices.append(torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0))
                found = True
        except RuntimeError:
            found = False
        if not found:
            raise ConfigError(f"{role_name} is {text!r}; write GPUs as 0-4 or 0,2, or names such as cpu,cpu or cuda:0,cuda:0")
    missing = sorted({str(d) for d in devices if d.type == "cuda" and (d.index or 0) >= num_gpus})
    if missing:
        raise ConfigError(f"{role_name} names {', '.join(missing)}, but this machine has {num_gpus} GPUs; name those, or cpu")
    return devices


def target_groups(config: RunConfig) -> list[tuple[torch.device, ...]]:
    """The devices of each target thread: one, or the `target.spread` that hold its target together.

    Raises:
        ConfigError: no such device, or their number does not come out even.
    """
    devices, each = parse_devices(config.train.target_devices, "target"), config.target.spread
    if len(devices) % each:
        raise ConfigError(
            f"target.spread is {each}, but train.target_devices has {len(devices)} devices; give a multiple of {each}"
        )
    return [tuple(devices[i : i + each]) for i in range(0, len(devices), each)]


def group_name(group: tuple[torch.device, ...]) -> str:
    """The devices of a target thread, as they are shown."""
    return "+".join(map(str, group))


__all__ = [
    "Batch",
    "Channel",
    "Clock",
    "Crew",
    "Meeting",
    "Pipeline",
    "Source",
    "Stopped",
    "Topology",
    "dump_stacks",
    "group_name",
    "hand_over",
    "parse_devices",
    "receive",
    "target_groups",
    "with_states",
]
