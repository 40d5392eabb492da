"""From shards to drafters: a reader thread, target threads, bounded channels, drafter threads.

Micro-batch n of a step goes to drafter n mod G, of the G drafters of all hosts. Targets take micro-batches in the order
in which the reader makes them and may finish in another; channels put them back in order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dflash_train.anchors import Anchors, draw_anchors
from dflash_train.config import RunConfig
from dflash_train.crew import Channel, Clock, Crew
from dflash_train.packing import PackedDocuments, PackedRows, RowSampler
from dflash_train.targets import TargetStates


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
