"""Keeping drafters alike: sums over the drafters of this host, then over hosts.

Only one thread runs these at a time, while the threads of the drafters wait for it at a barrier.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dflash_train.config import ConfigError

HOST_TIMEOUT = timedelta(minutes=10)
"""How long a host waits for the others: it covers a compile that only they must do."""


class Hosts:
    """The processes of a run, one for each host: those that `torchrun` started, or this one alone.

    Two process groups: one for the steps, one for the thread that writes checkpoints, so that the collectives of each
    keep an order of their own.

    Args:
        alone: this process by itself, whatever others there are, or were.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.rank, self.size = 0, 1
        self._started = False
        if alone or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            store, rank, size = next(rendezvous("env://", timeout=HOST_TIMEOUT))
            # torchrun keeps its store when it restarts workers: addresses of dead ones would be read, and waited for
            # (pytorch #135712).
            life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"life-{life}", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=HOST_TIMEOUT)
            self._started = True
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._writers = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the hosts. All hosts give the same shapes in the same order."""
        if self.size == 1:
            return
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            assert work is not None
            work.wait()

    def agree(self, what: str, value: int) -> None:
        """Whether all hosts have the same number of something.

        Raises:
            ConfigError: they do not; the message lists what each has.
        """
        if self.size == 1:
            return
        values = torch.zeros(self.size, dtype=torch.int64)
        values[self.rank] = value
        self.sum([values])
        if len(set(values.tolist())) > 1:
            raise ConfigError(f"all hosts need the same {what}, but ranks 0 … {self.size - 1} have {values.tolist()}")

    def wait(self) -> None:
        """Wait until every host is here."""
        self.sum([torch.zeros(1)])

    def wait_as_writer(self) -> None:
        """The same for the threads that write checkpoints."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self._writers)

    def close(self) -> None:
        """Leave the others."""
        if self._started and dist.is_initialized():
            dist.destroy_process_group()


@torch.no_grad()
def combine(drafters: Sequence[Sequence[Tensor]], hosts: Hosts, factor: float = 1.0) -> None:
    """Replace tensor i of every drafter by its sum over all drafters of all hosts, times `factor`.

    The sum runs in the order of the drafters on the first one's device, so it is the same in every run, and every
    drafter ends with the same bits. Copies between devices are ordered by torch with the streams of both.
    """
    first, others = list(drafters[0]), [list(drafter) for drafter in drafters[1:]]
    for other in others:
        if _beside(first, other):
            torch._foreach_add_(first, other)
        else:  # one at a time: a copy of all of them would take as much room again
            for total, part in zip(first, other, strict=True):
                total.add_(part.to(total.device))
    hosts.sum(first)
    if factor != 1.0:
        torch._foreach_mul_(first, factor)
    for other in others:
        torch._foreach_copy_(other, first)


def _beside(first: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(a.device == b.device for a, b in zip(first, other, strict=True))
