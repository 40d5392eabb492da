"""All drafters of a host: how they are kept alike with each other and with those of other hosts, and what is saved of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_train.averaging import Hosts, combine
from dflash_train.checkpoint import Progress, Snapshot, mean_of
from dflash_train.config import RunConfig
from dflash_train.pipeline import Topology
from dflash_train.replica import Replica


def alike_always(config: RunConfig, topology: Topology) -> bool:
    """Whether all drafters have the same weights after every step."""
    return config.train.synchronise == "gradients" or topology.drafters == 1


class Replicas:
    """The drafters of this host. Used by one thread at a time, while those of the drafters wait."""

    def __init__(self, config: RunConfig, topology: Topology, hosts: Hosts, replicas: Sequence[Replica]) -> None:
        self._config = config
        self._topology = topology
        self._hosts = hosts
        self._all = replicas

    def alike(self, step: int) -> bool:
        """Whether all drafters have the same weights and moments once `step` steps are done."""
        train = self._config.train
        averaged = train.average_moments and step % train.average_every == 0
        return averaged or alike_always(self._config, self._topology)

    def combine_gradients(self) -> None:
        """Give every drafter the sum of all gradients, over all hosts."""
        combine([replica.gradients for replica in self._all], self._hosts)

    def average(self) -> None:
        """Give every drafter the mean of all weights, and of the moments if the settings say so, over all hosts."""
        share = 1 / self._topology.drafters
        combine([list(replica.masters.values()) for replica in self._all], self._hosts, share)
        if self._config.train.average_moments:
            combine([list(replica.moments().values()) for replica in self._all], self._hosts, share)
        for replica in self._all:
            replica.publish()

    def mean_here(self, step: int) -> dict[str, Tensor]:
        """The mean of the weights of this host's drafters, on the CPU."""
        return mean_of([replica.masters for replica in self._all[: 1 if self.alike(step) else None]])

    def snapshot(self, progress: Progress) -> Snapshot:
        """Copies on the CPU of what a checkpoint holds; all hosts take part where drafters differ."""
        alike = self.alike(progress.step)
        weights = self.mean_here(progress.step)
        if not alike:
            self._hosts.sum(list(weights.values()))
            weights = {name: weight / self._hosts.size for name, weight in weights.items()}
        files: dict[int, dict[str, Tensor]] = {}
        first = self._topology.rank * self._topology.drafters_here
        for i, replica in enumerate(self._all):
            if alike and first + i > 0:
                break
            kept = {f"moment.{name}": value for name, value in replica.moments().items()}
            if not alike:
                kept |= {f"weight.{name}": value for name, value in replica.masters.items()}
            files[first + i] = {name: value.detach().to("cpu", copy=True) for name, value in kept.items()}
            files[first + i]["rng.cpu"] = torch.get_rng_state()
        return Snapshot(
            progress=progress,
            config=self._config,
            weights=weights,
            replicas=files,
            num_replicas=1 if alike else self._topology.drafters,
        )
