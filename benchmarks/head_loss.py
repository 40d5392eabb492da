"""The head loss, forward and backward: fused, the checkpointed reference, the reference compiled, liger-kernel where it is.

    python -m benchmarks.head_loss [--rounds 7] [--limit 120] [--quick] [--chunks 512,1020,1530] [--json FILE]

Random bf16 states and head, all slots supervised, uniform weights, so that every side computes the same sum. Extra memory is
the peak above the inputs (gradient included). `--chunks` times the fused loss at other chunk sizes, to check the rule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import compile_guard
from benchmarks.measure import Timing, environment, markdown, time_cuda, write_json
from dflash_train import losses
from dflash_train.config import LossConfig
from dflash_train.losses import block_loss
from dflash_train.vocabulary import Vocabulary

BLOCKS, SLOTS = 512, 15
SIZES = ((151_936, 4096), (151_936, 5120), (248_320, 4096), (248_320, 5120))
TERMS = {
    "ce": LossConfig(weighting="uniform"),
    "kl": LossConfig(ce=0.0, kl=1.0, weighting="uniform"),
    "ce + kl + cap": LossConfig(ce=0.5, kl=0.5, cap=0.1, weighting="uniform"),
}
Side = Callable[[], tuple[Tensor, Tensor]]


class Problem:
    """Inputs of one size, and the sides that work on them."""

    def __init__(self, vocab: int, width: int, blocks: int = BLOCKS) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(torch.bfloat16)

        head = normal(vocab, width, scale=2 / width**0.5)
        self.vocabulary = Vocabulary(embedding=head, head=head)
        self.hidden = normal(blocks, SLOTS, width).requires_grad_()
        self.teacher = (self.hidden.detach() + normal(blocks, SLOTS, width, scale=0.5)).contiguous()
        self.labels = torch.randint(0, vocab, (blocks, SLOTS), generator=generator, device="cuda")
        self.supervised = torch.ones(blocks, SLOTS, dtype=torch.bool, device="cuda")

    def ours(self, config: LossConfig) -> tuple[Tensor, Tensor]:
        self.hidden.grad = None
        numerator = block_loss(self.hidden, self.labels, self.supervised, self.vocabulary, config, self.teacher).numerator
        numerator.backward()
        assert self.hidden.grad is not None
        return numerator.detach(), self.hidden.grad

    def liger(self, term: str) -> tuple[Tensor, Tensor]:
        self.hidden.grad = None
        rows, head = self.hidden.flatten(0, 1), self.vocabulary.head
        if term == "ce":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")(head, rows, self.labels.flatten())
        else:
            from liger_kernel.transformers import LigerFusedLinearJSD

            # Beta 0 is KL(teacher, student); it divides by the number of rows.
            loss = LigerFusedLinearJSD(jsd_beta=0.0)(rows, head, self.teacher.flatten(0, 1), head) * len(rows)
        loss.backward()
        assert self.hidden.grad is not None
        return loss.detach(), self.hidden.grad


@contextmanager
def chunks_of(rows: int) -> Iterator[None]:
    """The fused loss with a given chunk."""
    from dflash_train.kernels import head_loss

    rule = head_loss.rows_per_chunk
    head_loss.rows_per_chunk = lambda num_rows, width, row_bytes, multiple, processors: rows // multiple * multiple  # type: ignore[assignment]
    try:
        yield
    finally:
        head_loss.rows_per_chunk = rule


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def measure(problem: Problem, term: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """All sides on one term; the first is the reference that the others are compared with."""
    config = TERMS[term]
    reference = replace(config, implementation="reference")

    sides: dict[str, Side] = {
        "reference, chunks of 512": lambda: problem.ours(reference),
        "reference, chunks of 1,024": lambda: problem.ours(replace(reference, chunk_rows=1024)),
        "fused": lambda: problem.ours(replace(config, implementation="fused")),
    }
    if term in ("ce", "kl"):
        sides["liger-kernel"] = lambda: problem.liger(term)
    if not options.quick:
        wrapper = compile_guard.compile(losses._chunk_sums, dynamic=False)
        plain = losses._chunk_sums

        def run_compiled() -> tuple[Tensor, Tensor]:
            losses._chunk_sums = wrapper
            try:
                return problem.ours(reference)
            finally:
                losses._chunk_sums = plain

        sides["reference, chunks of 512 compiled"] = run_compiled
    for rows in [int(chunk) for chunk in options.chunks.split(",") if chunk]:

        def with_rows(rows: int = rows) -> tuple[Tensor, Tensor]:
            with chunks_of(rows):
                return problem.ours(replace(config, implementation="fused"))

        sides[f"fused, chunks of {rows:,}"] = with_rows
    result: dict[str, Any] = {}
    truth: tuple[Tensor, Tensor] | None = None
    for name, side in sides.items():
        if time.perf_counter() > deadline:
            print(f"  {name}: left out, the time limit is reached", flush=True)
            continue
        try:
            value, gradient = side()
            if truth is None:
                truth = value, gradient.clone()
            errors = {"value_error": relative(value, truth[0]), "gradient_error": relative(gradient, truth[1])}
            del value, gradient
            timing: Timing = time_cuda(side, warm_ups=1, rounds=options.rounds, limit_s=10)
        except (ImportError, RuntimeError, TypeError) as error:  # a peer that is not there, or that has no memory left
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        result[name] = {**timing.as_dict(), **errors}
        print(
            f"  {name:<36} {timing.median:8.2f} ms ±{timing.spread:5.1%}  extra {timing.extra_gib:5.2f} GiB   value off "
            f"{errors['value_error']:.0e}, gradient {errors['gradient_error']:.0e}",
            flush=True,
        )
    return result


def main() -> None:
    """Measure every size and term within the time limit; print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which nothing new is begun")
    parser.add_argument("--quick", action="store_true", help="first and last size, nothing compiled")
    parser.add_argument("--chunks", default="", help="further chunk sizes of the fused loss, with commas")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    deadline = time.perf_counter() + options.limit
    print(environment(), flush=True)
    results: dict[str, Any] = {}
    rows: list[list[str]] = []
    for vocab, width in (SIZES[0], SIZES[-1]) if options.quick else SIZES:
        problem = Problem(vocab, width)
        for term in TERMS:
            print(f"{BLOCKS * SLOTS:,} rows, V {vocab:,}, H {width:,}, {term}", flush=True)
            result = results[f"{vocab}/{width}/{term}"] = measure(problem, term, options, deadline)
            against = result.get("reference, chunks of 512", {}).get("ms")
            for name, row in result.items():
                ratio = f"{against / row['ms']:.2f}" if against else ""
                figures = [f"{row['ms']:.1f}", ratio, f"{row['extra_gib']:.2f}", f"{row['gradient_error']:.0e}"]
                rows.append([f"{vocab:,}", f"{width:,}", term, name, *figures])
        del problem
        torch.cuda.empty_cache()
    print()
    print(markdown(["V", "H", "terms", "side", "ms", "times the reference's speed", "extra GiB", "gradient off"], rows))
    write_json(options.json, {"head_loss": results})


if __name__ == "__main__":
    main()
