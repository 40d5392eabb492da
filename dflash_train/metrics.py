"""A record of each step: the line that is printed, `metrics.jsonl`, and further loggers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from dflash_train.config import ConfigError

METRICS = "metrics.jsonl"


def _show(form: str, unit: str = "") -> dict[str, str]:
    return {"form": form, "unit": unit}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step. The printed line has these fields in this order, and `metrics.jsonl` has them under their names."""

    step: int
    """Steps done."""
    steps: int
    """Of the whole run."""
    loss: float = dataclasses.field(metadata=_show("{:.4f}"))
    """Of all drafters, all batches of the step."""
    accept: float = dataclasses.field(metadata=_show("{:.2f}"))
    """Drafts of a block that greedy decoding of the text would accept: teacher-forced, on the step's own anchors."""
    accuracy: float = dataclasses.field(metadata=_show("{:.3f}"))
    """Part of the supervised slots whose most likely token is the label."""
    lr: float = dataclasses.field(metadata=_show("{:.2e}"))
    grad_norm: float = dataclasses.field(metadata=_show("{:.3f}"))
    """Before clipping; the first drafter's."""
    target_tok_s: float = dataclasses.field(metadata=_show("{:,.0f}"))
    """Tokens that the targets of this host run in a second, since the step before."""
    drafter_tok_s: float = dataclasses.field(metadata=_show("{:,.0f}"))
    """Tokens of context on which all drafters of all hosts train in a second."""
    target_wait: float = dataclasses.field(metadata=_show("{:.0%}"))
    """Part of the target threads' time spent waiting, for the reader or for room, since the start."""
    drafter_wait: float = dataclasses.field(metadata=_show("{:.0%}"))
    """Part of the drafter threads' time spent waiting for hidden states, since the start."""
    step_s: float = dataclasses.field(metadata=_show("{:.3f}", " s"))
    """Seconds since the step before."""
    memory_gib: float = dataclasses.field(metadata=_show("{:.1f}", " GiB"))
    """Largest peak among the GPUs; without one, of the process."""
    bad_steps: int = dataclasses.field(metadata=_show("{}"))
    """Steps skipped because a gradient was not finite."""
    epoch: float = dataclasses.field(metadata=_show("{:.2f}"))
    """Passes over the data."""
    saved: int = dataclasses.field(metadata=_show("{}"))
    """Step of the last checkpoint handed to the writer; 0 for none."""
    eta_s: float = dataclasses.field(metadata=_show("{:.0f}", " s"))
    """Seconds to the end at the pace since the start."""

    def line(self) -> str:
        """The fields, aligned, with their names."""
        width = max(5, len(str(self.steps)))
        parts = [f"step {self.step:0{width}d}/{self.steps:0{width}d}"]
        for field in dataclasses.fields(self)[2:]:
            parts.append(f"{field.name} {field.metadata['form'].format(getattr(self, field.name))}{field.metadata['unit']}")
        return " | ".join(parts)


class Logger(Protocol):
    """Where records go."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take the record of a step; `step` is its number."""

    def close(self) -> None:
        """Write what is held."""


class JsonLines:
    """`metrics.jsonl`: one line a step. On resuming, lines of steps that are done again are dropped."""

    def __init__(self, path: Path, after_step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= after_step]
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
        os.replace(unfinished, path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record; a number that is not finite, for which JSON has no word, as null."""
        shown = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(shown) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a file; a line that a killed process left unfinished is passed over."""
    if not path.is_file():
        return []
    records = []
    for text in path.read_text("utf-8").splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write every number of the record."""
        for name, value in record.items():
            self._writer.add_scalar(f"train/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Tracker:
    """trackio or W&B, whose interfaces are alike: `module` is its name."""

    def __init__(self, module: str, run: Path, config: Mapping[str, Any]) -> None:
        self._module: Any = importlib.import_module(module)
        self._module.init(project="dflash-train", name=run.name, config=dict(config))

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the record."""
        self._module.log(dict(record), step=record["step"])

    def close(self) -> None:
        """Finish the run there."""
        self._module.finish()


def open_logger(name: str, run: Path, config: Mapping[str, Any]) -> Logger:
    """`tensorboard`, `trackio` or `wandb`.

    Raises:
        ConfigError: its package is not installed; the message has the command.
    """
    try:
        return TensorBoard(run) if name == "tensorboard" else Tracker(name, run, config)
    except ImportError as error:
        raise ConfigError(f"--log {name} needs that package: pip install {name}") from error


def peak_memory_gib(devices: Sequence[torch.device]) -> float:
    """Largest peak of allocated memory among the GPUs; without one, peak of the process."""
    gpus = {device for device in devices if device.type == "cuda"}
    if gpus:
        return max(torch.cuda.max_memory_allocated(device) for device in gpus) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
