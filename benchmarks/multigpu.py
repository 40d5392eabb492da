"""Everything that only a host with several GPUs can show, in one go; on one GPU or the CPU with logical devices.

    python -m benchmarks.multigpu [--logical-devices N] [--stages tests,hazards,drafters,scaling,hosts,copies]
        [--config gemma3-270m --set target.path=… --set data.path=…] [--iterations 20] [--steps 60] [--json FILE]

* `tests`: `pytest -m multigpu` and `pytest -m stress -n 2`.
* `hazards`: each entry of the catalogue without the guard, N times: how often it occurs here.
* `drafters`: `repro/threaded_drafters.py` with a thread for each device, with the guard N times and without N/2 times, both
  checkpoint modes, one wrapper for all threads and one for each.
* `scaling`: tokens a second of the trainer at (targets, drafters) = (1, 1), (2, 2), (5, 3), as far as devices go, with waits
  and the time of meetings; a random pair, or what `--config` and `--set` name.
* `hosts`: two processes by torchrun, each with half of the devices, against one process with all: the losses are the same.
* `copies`: bytes a second of a batch's hidden states between two devices as the pipeline copies them, against one large copy.

Each stage's figures are written as soon as it ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import environment, markdown, write_json
from benchmarks.pipeline import SIZES, config_of, make_data, make_target
from compile_guard.hazards import catalogue
from dflash_train.anchors import Anchors
from dflash_train.config_files import dump_config, load_config
from dflash_train.metrics import read_metrics
from dflash_train.packing import PackedRows
from dflash_train.pipeline import Batch, hand_over, receive
from dflash_train.targets import TargetStates

ROOT = Path(__file__).resolve().parents[1]
TOPOLOGIES = ((1, 1), (2, 2), (5, 3))
"""Targets, drafters."""


def call(command: Sequence[str], limit_s: float, **environment: str) -> tuple[int | None, str]:
    """Exit status (None: ended at the limit) and what was said."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as ended:
        return None, str(ended.stdout or "")
    return done.returncode, done.stdout + done.stderr


class Check:
    """The devices, the options, and the stages."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.logical = options.logical_devices
        one = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.devices = [one] * self.logical if self.logical else [f"cuda:{i}" for i in range(torch.cuda.device_count())]

    def tests(self) -> dict[str, Any]:
        logical = [f"--logical-devices={self.logical}"] if self.logical else []
        results = {}
        for name, more in (("multigpu", []), ("stress", ["-n", "2"])):
            status, said = call(["-m", "pytest", "-q", "-m", name, *more, *logical], 1800)
            last = (said.strip().splitlines() or ["nothing said"])[-1]
            results[name] = {"status": status, "said": last}
            print(f"  pytest -m {name}: status {status}; {last}", flush=True)
        return results

    def hazards(self) -> dict[str, Any]:
        results = {}
        for hazard in catalogue().values():
            count = str(self.options.iterations)
            command = ["-m", "compile_guard.hazards", hazard.name, "--iterations", count, "--json"]
            status, said = call(command, 100.0 * self.options.iterations)
            # The last line is the document; a warning of torch may stand before it.
            exits = [each["exit"] for each in json.loads(said.splitlines()[-1])["iterations"]] if status is not None else []
            counts = {"occurred": exits.count(1), "safe": exits.count(0), "not_run": exits.count(2)}
            results[hazard.id] = {"name": hazard.name, **counts}
            print(f"  {hazard.id:<4} {hazard.name:<20} occurs in {exits.count(1)} of {len(exits)}", flush=True)
        return results

    def drafters(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        variants = list(itertools.product(("--non-reentrant", "--reentrant"), ("singleton", "per-thread")))
        for guard, count in ((True, self.options.iterations), (False, max(1, self.options.iterations // 2))):
            for number in range(count):
                mode, wrappers = variants[number % len(variants)]
                arguments = [mode, "--wrappers", wrappers, *(["--guard"] if guard else []), "--timeout", "120"]
                script = ["repro/threaded_drafters.py", "--devices", ",".join(self.devices), "--steps", "6", *arguments]
                with tempfile.TemporaryDirectory() as cache:
                    status, said = call(script, 150, TORCHINDUCTOR_CACHE_DIR=cache)
                key = f"{'guarded' if guard else 'bare'} {mode} {wrappers}"
                row = results.setdefault(key, {"runs": 0, "finished": 0, "ends": []})
                row["runs"] += 1
                row["finished"] += status == 0
                if status != 0:
                    row["ends"].append((said.strip().splitlines() or ["hung, said nothing"])[-1][:200])
        for key, row in results.items():
            print(f"  {key}: {row['finished']} of {row['runs']} finished; {' | '.join(sorted(set(row['ends'])))}", flush=True)
        return results

    def prepare(self, steps: int, targets: str, drafters: str) -> Path:
        """A configuration for the trainer, as a file."""
        root = self.folder / "run"
        if self.options.config:
            config = load_config(self.options.config, self.options.set)
        else:
            size = SIZES["small" if torch.cuda.is_available() else "tiny"]
            if not root.is_dir():
                root.mkdir()
                make_target(root / "target", size)
                make_data(root / "data", size, 64)
            config = config_of(root, size, steps, 1, 1, "cpu")
        train = replace(config.train, steps=steps, log_every=steps, target_devices=targets, drafter_devices=drafters)
        file = self.folder / f"{time.monotonic_ns()}.toml"
        file.write_text(dump_config(replace(config, train=train)), "utf-8")
        return file

    def scaling(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for targets, drafters in TOPOLOGIES:
            if targets + drafters > len(self.devices) and not self.logical:
                print(f"  {targets}+{drafters}: left out, {len(self.devices)} devices", flush=True)
                continue
            row = list(itertools.islice(itertools.cycle(self.devices), targets + drafters))
            file = self.prepare(self.options.steps, ",".join(row[:targets]), ",".join(row[targets:]))
            run = file.with_suffix("")
            status, said = call(["-m", "dflash_train", "train", str(file), "-o", str(run)], 900)
            if status != 0:
                results[f"{targets}+{drafters}"] = {"status": status, "said": said[-1000:]}
                print(f"  {targets}+{drafters}: status {status}: {said.strip().splitlines()[-1:]}", flush=True)
                continue
            records = read_metrics(run / "metrics.jsonl")
            steady = records[len(records) // 4 :]
            rate = statistics.median(record["drafter_tok_s"] for record in steady)
            spent = json.loads((run / "summary.json").read_text("utf-8"))["seconds"]
            base = results.get("1+1", {}).get("tok_s")
            results[f"{targets}+{drafters}"] = {
                "tok_s": rate,
                "of_linear": rate / base / drafters if base else 1.0,
                "drafter_wait": statistics.median(record["drafter_wait"] for record in steady),
                "target_wait": statistics.median(record["target_wait"] for record in steady),
                "seconds": spent,
            }
            shown = results[f"{targets}+{drafters}"]
            print(
                f"  {targets}+{drafters}: {rate:,.0f} tok/s, {shown['of_linear']:.3f} of linear; drafters wait "
                f"{shown['drafter_wait']:.1%}, targets {shown['target_wait']:.1%}",
                flush=True,
            )
        return results

    def hosts(self) -> dict[str, Any]:
        """The same rows a step on both sides: each of two processes has half of the drafters."""
        half = max(1, len(self.devices) // 2)
        on_gpus = self.devices[0] != "cpu" and not self.logical
        # Each process numbers the GPUs that it is shown from 0.
        names = [f"cuda:{i}" for i in range(half)] if on_gpus else self.devices[:half]
        steps = min(20, self.options.steps)
        runs = {}
        two = self.prepare(steps, ",".join(names), ",".join(names))
        one = self.prepare(steps, ",".join(self.devices[: 2 * half]), ",".join(self.devices[: 2 * half]))
        port = 29500 + os.getpid() % 1000
        rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        processes = []
        for rank in range(2):
            shown = ",".join(str(rank * half + i) for i in range(half))
            command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--node-rank={rank}", "-m", "dflash_train"]
            processes.append(
                subprocess.Popen(
                    [*command, "train", str(two), "-o", str(two.with_suffix(""))],
                    cwd=ROOT,
                    env={**os.environ, **({"CUDA_VISIBLE_DEVICES": shown} if on_gpus else {})},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = []
        for process in processes:
            try:
                said.append(process.communicate(timeout=600)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(process.communicate()[0] + "\nended at the limit")
        status, told = call(["-m", "dflash_train", "train", str(one), "-o", str(one.with_suffix(""))], 600)
        if status != 0 or any(process.returncode for process in processes):
            ends = [text[-500:] for text in (*said, told)]
            print(f"  failed: {[process.returncode for process in processes]}, {status}\n" + "\n".join(ends), flush=True)
            return {"statuses": [*(process.returncode for process in processes), status], "said": ends}
        for name, file in (("two", two), ("one", one)):
            runs[name] = [record["loss"] for record in read_metrics(file.with_suffix("") / "metrics.jsonl")]
        off = max(abs(a - b) / abs(b) for a, b in zip(runs["two"], runs["one"], strict=True))
        print(f"  losses of two processes against one, {steps} steps: at most {off:.1e} apart", flush=True)
        return {"losses": runs, "largest_relative_difference": off}

    def copies(self) -> dict[str, Any]:
        if not torch.cuda.is_available():
            print("  left out: no GPU", flush=True)
            return {}
        source, sink = torch.device(self.devices[0]), torch.device(self.devices[-1])

        def gigabytes_a_second(copy: Callable[[], Any], num_bytes: int) -> float:
            times = []
            for _ in range(7):
                torch.cuda.synchronize(source)
                torch.cuda.synchronize(sink)
                began = time.perf_counter()
                copy()
                torch.cuda.synchronize(source)
                torch.cuda.synchronize(sink)
                times.append(time.perf_counter() - began)
            return num_bytes / statistics.median(times[2:]) / 1e9

        large, there = (torch.empty(2**30, dtype=torch.uint8, device=device) for device in (source, sink))
        link = gigabytes_a_second(lambda: there.copy_(large), large.numel())
        length, width = 3072, 4096
        tokens = torch.zeros(1, length, dtype=torch.int64, device=source)
        rows = PackedRows(
            tokens=tokens,
            loss_mask=tokens.bool(),
            documents=tokens,
            positions=tokens,
            document_numbers=((0,),),
        )
        anchors = Anchors(positions=tokens[:, :512], valid=tokens[:, :512].bool(), num_empty_documents=0, num_over_budget=0)
        states = TargetStates(
            taps=torch.randn(1, length, 5 * width, device=source, dtype=torch.bfloat16),
            final=torch.randn(1, length, width, device=source, dtype=torch.bfloat16),
        )
        batch = Batch(step=0, rows=rows, anchors=anchors, num_tokens=length, states=states)
        num_bytes = 2 * (states.taps.numel() + states.final.numel())
        rate = gigabytes_a_second(lambda: receive(hand_over(batch, sink, torch.bfloat16), sink), num_bytes)
        what = f"one large copy {link:.0f} GB/s, a batch of {num_bytes / 1e6:.0f} MB {rate:.0f} GB/s"
        print(f"  {source} to {sink}: {what}", flush=True)
        return {"link_gb_s": link, "pipeline_gb_s": rate, "bytes": num_bytes, "devices": [str(source), str(sink)]}


STAGES: dict[str, Callable[[Check], dict[str, Any]]] = {
    "tests": Check.tests,
    "hazards": Check.hazards,
    "drafters": Check.drafters,
    "scaling": Check.scaling,
    "hosts": Check.hosts,
    "copies": Check.copies,
}


def main() -> int:
    """Run the stages; print their figures and a table, write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logical-devices", type=int, default=0, metavar="N", help="threads' worth on one GPU, or the CPU")
    parser.add_argument("--stages", default=",".join(STAGES), help="with commas")
    parser.add_argument("--config", help="preset or file of the trainer for the scaling, instead of a random pair")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings for --config")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of the trainer")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    stages = options.stages.split(",")
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        parser.error(f"--stages names {', '.join(unknown)}; there are: {', '.join(STAGES)}")
    if not options.logical_devices and torch.cuda.device_count() < 2:
        parser.error(f"this machine has {torch.cuda.device_count()} GPUs; give --logical-devices N to make do with it")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options, Path(folder))
        print(f"devices: {', '.join(check.devices)}{' (logical)' if check.logical else ''}", flush=True)
        for name in stages:
            print(f"{name} …", flush=True)
            began = time.monotonic()
            results[name] = STAGES[name](check)
            results[name]["stage_s"] = round(time.monotonic() - began, 1)
            write_json(options.json, {"multigpu": results})
    rows = [
        [topology, f"{row['tok_s']:,.0f}", f"{row['of_linear']:.3f}", f"{row['drafter_wait']:.1%}", f"{row['target_wait']:.1%}"]
        for topology, row in results.get("scaling", {}).items()
        if isinstance(row, dict) and "tok_s" in row
    ]
    print(environment())
    print(markdown(["targets + drafters", "tok/s", "of linear", "drafters wait", "targets wait"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
