"""The trainer on one GPU with a real small target: 1 target and 3 drafter threads, beside SpecForge's core in a plain loop.

    python -m benchmarks.trainer_gemma [--target DIR|GGUF] [--steps 500] [--limit 300] [--parts …] [--json FILE]

Gemma 3 270M (random weights of its shape without `--target`), 1,024 documents of 233 to 313 tokens that it writes itself
(random ones with random weights), the last 160 supervised, 40 anchors in each, blocks of 8, drafter of 4 layers, bf16.

`specforge`: SpecForge's `OnlineDFlashModel` (flex, AdamW), the target's forward in the same loop, batches of 48 documents.
`train`: the trainer with the fused loss: batches of 48 documents for each drafter, then 48 spread over the 3 drafters;
briefly the latter with another `sys.setswitchinterval`, and without the target's CUDA graph.
`modes`: the trainer with the reference loss in both checkpoint modes, batches of 24 over the 3 drafters, each `--steps` steps
in a process of its own, both at once. No finding and no compile may come after the warm-up.
`unguarded`: a short run in many processes at once, beside `modes` if that is asked for as well: guard off and on, without the
warm-up, so that the drafter threads compile at once; and guard off with it. Of guarded runs that do not end in time the stacks
are shown.

Without a GPU all of it runs in a tiny size, which shows only that it runs. Exits with 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import compile_guard
from benchmarks.measure import environment, write_json
from benchmarks.processes import Ended, dump_when_late, last_stacks, run_process
from benchmarks.road_parts import save_weights
from benchmarks.specforge_side import make_online
from benchmarks.trainer_run import judged_run, random_documents, report, verdict, write_documents
from dflash_train import trainer
from dflash_train.config import RunConfig, TargetConfig
from dflash_train.config_files import dump_config, load_config
from dflash_train.data import Documents
from dflash_train.replica import learning_rate
from dflash_train.targets import Target, load_target

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BATCH, ANCHORS, ANSWER, DOCUMENTS = 48, 40, 160, 1024
BOUND = 1.3
"""Times SpecForge's rate."""
BRIEF_S = 12.0
"""Seconds of a run that is only compared."""
TOPOLOGY = ["train.target_devices=cuda:0", "train.drafter_devices=cuda:0,cuda:0,cuda:0"]


def settings(root: Path, steps: int) -> list[str]:
    common = [f"data.path={root / 'data'}", f"train.steps={steps}", f"train.log_every={max(1, steps // 5)}"]
    common += [f"target.path={root / 'target'}", "train.save_every=100000"]
    if not CUDA:
        # Flex attention has no backward there: the drafter is compiled as a whole instead.
        tiny = ["train.target_devices=cpu", "train.drafter_devices=cpu,cpu,cpu", "train.compile=true", "data.row_length=640"]
        return [*common, *tiny, "target.path=tiny", "data.rows_per_batch=1", "anchors.per_row=16", "drafter.attention=sdpa"]
    # Four documents of 273 tokens on the average in a row; 4 rows for each of 3 drafters.
    rows = ["data.row_length=1152", "anchors.per_row=160", "data.rows_per_batch=4", "drafter.attention=flex"]
    taps = ["drafter.target_layer_ids=[1,4,8,12,15]"]
    return [*common, *TOPOLOGY, *rows, *taps, "target.dtype=bfloat16", "train.dtype=bfloat16"]


def config_of(root: Path, steps: int, *more: str) -> RunConfig:
    return load_config("gemma3-270m" if CUDA else "tiny-cpu", [*settings(root, steps), *more])


def prepare(root: Path, path: str | None) -> None:
    """The target as a folder, converted once, and its documents."""
    began = time.perf_counter()
    if not CUDA:
        write_documents(root / "data", random_documents(64, (100, 180), 40, 260), 264)
        return
    if path is None:
        random_gemma().save_pretrained(root / "target")
    else:
        save_weights(path, root / "target")
    print(f"target ready after {time.perf_counter() - began:.1f} s", flush=True)
    model: Any = load_target(TargetConfig(path=str(root / "target"), dtype="bfloat16"), (), DEVICE).model
    drawn = random_documents(DOCUMENTS, (73 + ANSWER, 153 + ANSWER), 0, 262144)
    if path is None:
        documents = [(tokens, len(tokens) - ANSWER) for tokens, _ in drawn]
    else:
        torch.manual_seed(0)
        start = torch.full((DOCUMENTS, 1), 2, device=DEVICE)  # <bos>
        with torch.no_grad():
            texts = model.generate(start, do_sample=True, min_new_tokens=312, max_new_tokens=312).cpu().numpy()
        documents = [(text[: len(cut)], len(cut) - ANSWER) for text, (cut, _) in zip(texts, drawn, strict=True)]
    write_documents(root / "data", documents, 262144)
    print(f"documents ready after {time.perf_counter() - began:.1f} s", flush=True)


def random_gemma() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)]
    torch.manual_seed(0)
    with DEVICE:
        model: Any = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
                num_key_value_heads=1, head_dim=256, sliding_window=512, layer_types=kinds, max_position_embeddings=32768,
            )
        )  # fmt: skip
    return model.bfloat16().cpu()


def padded(documents: Documents, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Tokens, loss mask and documents [48, 320], one document in a row as SpecForge takes them; tokens without padding."""
    chosen = [documents[number] for number in numbers]
    shape = (len(chosen), max(320 if CUDA else 0, *(len(document.tokens) for document in chosen)))
    tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    owners = torch.full(shape, -1)
    for row, document in enumerate(chosen):
        end = len(document.tokens)
        tokens[row, :end] = torch.from_numpy(document.tokens.astype(np.int64))
        mask[row, :end] = torch.from_numpy(document.supervised.astype(np.float32))
        owners[row, :end] = 0
    return tokens.to(DEVICE), mask.to(DEVICE), owners.to(DEVICE), int((owners >= 0).sum())


def specforge(config: RunConfig, target: Target, documents: Documents, steps: int, limit_s: float) -> dict[str, float] | None:
    """Rate of SpecForge's core in a plain loop; None where it is not installed."""
    vocabulary = target.vocabulary()
    try:
        online = make_online(config, vocabulary, ANCHORS, "flex_attention" if CUDA else "sdpa", 0)
    except ImportError as error:
        print(f"SpecForge is left out: {error}", flush=True)
        return None
    dtype = getattr(torch, config.train.dtype)
    online.draft_model = online.draft_model.to(DEVICE, dtype)
    optimizer = torch.optim.AdamW(online.draft_model.parameters(), lr=config.train.learning_rate, fused=True)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times: list[tuple[int, float]] = []
    began = time.perf_counter()
    batch = BATCH if CUDA else 4
    last = torch.zeros(())
    for step in range(steps):
        start = time.perf_counter()
        numbers = [(step * batch + i) % len(documents) for i in range(batch)]
        tokens, mask, owners, count = padded(documents, numbers)
        states = target.states(tokens, owners, torch.arange(tokens.shape[1], device=DEVICE).expand_as(tokens))
        loss, _, _ = online(tokens, states.taps.to(dtype), mask)
        loss.backward()
        last = loss.detach()
        torch.nn.utils.clip_grad_norm_(online.draft_model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(min(step, config.train.steps - 1), config.train)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if CUDA:
            torch.cuda.synchronize()
        times.append((count, time.perf_counter() - start))
        if time.perf_counter() - began > limit_s:
            break
    steady = times[min(10, len(times) // 2) :]
    rate = sum(count for count, _ in steady) / sum(spent for _, spent in steady)
    memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    report(f"SpecForge's core in a plain loop, {len(times)} steps of {batch} documents: tokens a second", f"{rate:,.0f}")
    median = statistics.median(spent for _, spent in steady)
    report("  median step; peak memory; last loss", f"{1e3 * median:.0f} ms; {memory:.1f} GiB; {float(last):.3f}")
    return {"tok_s": rate, "steps": len(times), "median_s": median, "memory_gib": memory}


def child(arguments: argparse.Namespace) -> int:
    """One run in this process; `--cold`: the drafter threads compile at once, each at its first batch."""
    dump_when_late()
    config, run = load_config(arguments.child), Path(arguments.run)
    if arguments.label:
        compile_guard.install("record")
        judged = judged_run(arguments.label, config, run, limit_s=arguments.limit if CUDA else None)
        (run / "figures.json").write_text(json.dumps(judged.figures()), "utf-8")
        return verdict()
    if arguments.cold:
        trainer._Run._warm_up = lambda run: None  # type: ignore[method-assign]
    outcome = trainer.train(config, run, report=lambda line: print(line, flush=True))
    print(f"finished {outcome.progress.step} steps")
    return 0


def command_of(root: Path, name: str, config: RunConfig, *more: str) -> list[str]:
    path = root / f"{name}.toml"
    path.write_text(dump_config(config), "utf-8")
    return [sys.executable, "-m", "benchmarks.trainer_gemma", "--child", str(path), "--run", str(root / name), *more]


REFERENCE = ["loss.implementation=reference", "loss.chunk_rows=2048", *(["data.rows_per_batch=2"] if CUDA else [])]


def modes(root: Path, steps: int, seconds: float, pool: ThreadPoolExecutor) -> dict[str, Future[Ended]]:
    """Begin the runs of both checkpoint modes, each in a process of its own."""
    begun: dict[str, Future[Ended]] = {}
    for mode in ("non-reentrant", "reentrant"):
        label = f"reference loss, {mode}"
        config = config_of(root, steps, *REFERENCE, f"loss.checkpoint={mode}")
        command = command_of(root, mode, config, "--label", f"1 target, 3 drafters, {label}", "--limit", str(seconds - 15))
        begun[label] = pool.submit(run_process, command, os.environ, root / f"{mode}.log", seconds)
    return begun


def tell_modes(root: Path, steps: int, begun: dict[str, Future[Ended]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for label, future in begun.items():
        ended = future.result()
        said = [line for line in ended.text.splitlines() if "bounds do not hold" not in line]
        print("\n".join(said if ended.how == "finished" else last_stacks(ended.text) if ended.late else said[-40:]))
        figures = root / label.rpartition(" ")[2] / "figures.json"
        results[label] = json.loads(figures.read_text("utf-8")) if figures.is_file() else {"ended": ended.how}
        done = results[label].get("step") or 0
        report(f"{label}: {steps} steps, and every bound of it", f"{done} steps, {ended.how}"[:40], _whole(ended, done, steps))
    return results


def _whole(ended: Ended, done: int, steps: int) -> bool:
    return ended.how == "finished" and done == steps


KINDS = {"guard on, no warm-up": (True, True), "guard off, no warm-up": (False, True), "guard off": (False, False)}
"""Whether the guard is on, and whether there is no warm-up."""


def unguarded(root: Path, counts: dict[str, int], at_once: int, timeout: float) -> dict[str, Any]:
    """Run the program in processes of their own, with compile caches of their own, and tell how each ended."""
    # Short, and small enough for all of them to share a GPU.
    config = config_of(root, 20 if CUDA else 3, "data.rows_per_batch=1", "train.log_every=1")

    def one(kind: str, number: int) -> Ended:
        guard, cold = KINDS[kind]
        name = f"{kind}-{number}".replace(" ", "-").replace(",", "")
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{root}/{name}-inductor", "TRITON_CACHE_DIR": f"{root}/{name}-triton"}
        environ = {**os.environ, **caches, "COMPILE_GUARD": "record" if guard else "off", "OMP_NUM_THREADS": "1"}
        environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        command = command_of(root, name, config, *(["--cold"] if cold else []))
        return run_process(command, environ, root / f"{name}.log", timeout, nice=10)

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        pending = {kind: [pool.submit(one, kind, i) for i in range(counts[kind])] for kind in KINDS}
        ends = {kind: [future.result() for future in futures] for kind, futures in pending.items() if futures}
    print(f"\nprocesses of their own, {timeout:.0f} s each at most: {time.perf_counter() - began:.0f} s in all", flush=True)
    for kind, ended in ends.items():
        hows = Counter(end.how for end in ended)
        finished, late = hows["finished"], sum(end.late for end in ended)
        shown = f"{finished} finished, {late} not in time, {len(ended) - finished - late} failed"
        report(f"{kind}: of {len(ended)} runs", shown, finished == len(ended) if KINDS[kind][0] else None)
        for how, count in hows.items():
            if how != "finished":
                print(f"  {count} x {how}", flush=True)
        for end in ended if KINDS[kind][0] else ():
            if end.late:
                print("\n".join(["  where one of them was:", *(f"    {line}" for line in last_stacks(end.text))]), flush=True)
    return {kind: [end.how for end in ended] for kind, ended in ends.items()}


def main() -> int:
    """All parts within the time limit; 0 if every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a folder or .gguf file of Gemma 3 270M; random weights without")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all (%(default)s)")
    parser.add_argument("--unguarded", type=int, default=10, help="runs with the guard off, no warm-up (%(default)s)")
    parser.add_argument("--guarded", type=int, default=3, help="with the guard on, no warm-up (%(default)s)")
    parser.add_argument("--warmed", type=int, default=0, help="with the guard off, warmed up in turn (%(default)s)")
    parser.add_argument("--at-once", type=int, default=13, help="of those at the same time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each of those (%(default)s)")
    parser.add_argument("--parts", default="specforge,train,modes,unguarded", help="(%(default)s)")
    parser.add_argument("--switch-interval", type=float, default=5e-4, help="seconds, of the run compared (%(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    for hidden in ("--child", "--run", "--label"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    faulthandler.dump_traceback_later(options.limit + 15, exit=True)
    parts = options.parts.split(",")
    deadline = time.perf_counter() + options.limit
    torch.backends.cuda.matmul.allow_tf32 = False
    compile_guard.install("record")
    card = torch.cuda.get_device_name() if CUDA else "CPU, tiny"
    print(f"torch {torch.__version__}, {card}; target {options.target or 'of random weights'}", flush=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prepare(root, options.target)
        peer = None
        if "specforge" in parts:
            config = config_of(root, options.steps)
            target = load_target(config.target, config.drafter.taps, DEVICE)
            peer = specforge(config, target, Documents(root / "data"), 120 if CUDA else 6, 25.0)
            results["specforge"] = peer
            del target
        if "train" in parts:
            results |= train_all(root, options, deadline if len(parts) < 3 else deadline - options.timeout, peer)
        left = max(30.0, deadline - time.perf_counter())
        with ThreadPoolExecutor(2) as pool:
            begun = modes(root, options.steps, left, pool) if "modes" in parts else {}
            if "unguarded" in parts:
                numbers = (options.guarded, options.unguarded, options.warmed)
                counts = dict(zip(KINDS, numbers, strict=True))
                results["processes"] = unguarded(root, counts, options.at_once, min(options.timeout, left))
            results |= tell_modes(root, options.steps, begun)
    print(json.dumps(environment()))
    write_json(options.json, {"trainer_gemma": results})
    faulthandler.cancel_dump_traceback_later()
    return verdict()


def train_all(
    root: Path, options: argparse.Namespace, deadline: float, peer: dict[str, float] | None
) -> dict[str, Any]:
    """The trainer with the fused loss, with what is left of the time."""
    each = ["data.rows_per_batch=12"] if CUDA else ["data.rows_per_batch=2"]
    whole, brief = options.steps, max(8, options.steps // 2)
    plans: list[tuple[str, int, list[str], float, bool]] = [
        (f"batches of {BATCH} documents for each drafter", whole, each, 5e-3, True),
        (f"batches of {BATCH} documents over the drafters", whole, [], 5e-3, True),
        (f"the latter with a switch interval of {options.switch_interval} s", brief, [], options.switch_interval, False),
        ("the latter without the target's CUDA graph", brief, ["target.cuda_graph=false"], 5e-3, False),
    ]
    results: dict[str, Any] = {}
    for index, (label, steps, more, interval, bound) in enumerate(plans):
        ahead = sum(plan[-1] for plan in plans[index:])
        left = deadline - time.perf_counter() - BRIEF_S * sum(not plan[-1] for plan in plans[index:])
        share = max(15.0, left / ahead) if bound else BRIEF_S
        config = config_of(root, steps, "loss.implementation=auto", *more)
        with switch_interval(interval):
            name, folder = f"1 target, 3 drafters, {label}", root / f"run-{index}"
            run = judged_run(name, config, folder, limit_s=share if CUDA else None)
        results[label] = run.figures()
        if peer is not None:
            results[label]["of_specforge"] = ratio = run.tok_s / peer["tok_s"]
            report("  of SpecForge's rate", f"{ratio:.2f}", ratio >= BOUND if CUDA and bound else None)
    return results


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """How long a thread keeps the interpreter lock that another one wants; Python's own is 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


if __name__ == "__main__":
    sys.exit(main())
