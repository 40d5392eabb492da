"""Which loss gives the longest accepted runs: drafters trained for the same seconds with each, judged by decoding.

    python -m benchmarks.losses --target DIR|tiny --preset gemma3-270m --data DIR --judge gsm8k.jsonl:1001-1319 \
        [--losses ce,kl,cap,dpace] [--seconds 90] [--seeds 3] [--judge-prompts 64] [--limit 1200] [--json FILE]

`--data` is a folder that `dflash-train prepare` or `benchmarks.road --work` made for that target. Every loss gets the same
seconds of steps, so a dearer one gets fewer steps. Columns: tau of chain and DDTree at T = 0, before a text first repeats 16
tokens in a row, and of chain and DDTree at T = 1; mean over seeds, and half the distance from the lowest to the highest. Seeds
go round by round, so that a run that is cut off has compared all losses alike.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import compile_guard
from benchmarks import road_parts as parts
from benchmarks.measure import environment, markdown
from benchmarks.road import find
from dflash_train.drafter_files import read_run
from dflash_train.evaluate import decoder_of, list_ways
from dflash_train.targets import load_target

LOSSES = {
    "ce": [],
    "kl": ["loss.ce=0", "loss.kl=1"],
    "cap": ["loss.cap=0.3"],
    "dpace": ["loss.weighting=dpace"],
    "lk": ["loss.ce=0", "loss.lk=1"],
}
"""Settings by name; what is not named is the preset's."""
COLUMNS = [("chain", 0.0), ("ddtree", 0.0), ("chain", 1.0), ("ddtree", 1.0)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and judge all losses and seeds within the limit; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="DIR|tiny")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=V", help="override a setting of all runs")
    parser.add_argument("--template", help="as for benchmarks.road")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--judge", nargs="+", required=True, metavar="FILE[:FIRST-LAST]")
    parser.add_argument("--losses", default="ce,kl,cap,dpace", help=f"of {', '.join(LOSSES)} (%(default)s)")
    parser.add_argument("--seconds", type=float, default=90.0, help="of steps, for each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter (%(default)s)")
    parser.add_argument("--budget", type=int, default=64, help="nodes of the tree (%(default)s)")
    parser.add_argument("--judge-prompts", type=int, default=64, help="of each file (%(default)s)")
    parser.add_argument("--judge-tokens", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--judge-batch", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds after which nothing new is begun (%(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    names = options.losses.split(",")
    unknown = [name for name in names if name not in LOSSES]
    if unknown:
        parser.error(f"--losses takes {', '.join(LOSSES)}; got {', '.join(unknown)}")
    compile_guard.install("record")
    with tempfile.TemporaryDirectory() as folder:
        return compare(names, options, Path(folder))


def compare(names: Sequence[str], options: argparse.Namespace, work: Path) -> int:
    """All runs, round by round."""
    clock = parts.Clock(options.limit)
    result: dict[str, Any] = {"environment": environment(), "seconds": options.seconds, "runs": []}
    words = parts.words_of(options.target, options.template)
    judges = [parts.select_lines(source, work) for source in options.judge]
    prompts = parts.read_judges(judges, words, options.judge_prompts)
    base = parts.run_config(options.preset, options.target, options.data, options.dtype, options.set)
    target = load_target(base.target, base.drafter.taps, parts.DEVICE)
    paces: dict[str, float] = {}
    taus: dict[str, list[list[float]]] = {name: [] for name in names}
    steps_of: dict[str, list[int]] = {name: [] for name in names}
    for seed in range(options.seeds):
        for name in names:
            if clock.is_over(f"{name}, seed {seed}"):
                continue
            config = parts.run_config(
                options.preset, options.target, options.data, options.dtype, [*options.set, *LOSSES[name]]
            )
            config = replace(config, train=replace(config.train, seed=seed), data=replace(config.data, seed=seed))
            if name not in paces:
                paces[name] = parts.step_seconds(config, work / "probe")
                shutil.rmtree(work / "probe")
            run = work / f"{name}-{seed}"
            seconds, steps = parts.train_for(config, run, options.seconds, paces[name], clock)
            decoder = decoder_of(target, config.drafter, read_run(run)[1])
            row = []
            for temperature in dict.fromkeys(temperature for _, temperature in COLUMNS):
                ways = list_ways(["chain", "ddtree"], [options.budget])
                rows = parts.judge(
                    decoder, prompts, words, ways, temperature, options.judge_tokens, options.judge_batch
                )
                row += [parts.tau(find(rows, mode), temperature) for mode, t in COLUMNS if t == temperature]
            shutil.rmtree(run)
            taus[name].append(row)
            steps_of[name].append(steps)
            shown = ", ".join(f"{mode} T={t:g} {value:.3f}" for (mode, t), value in zip(COLUMNS, row, strict=True))
            clock.say(f"{name}, seed {seed}: {steps} steps in {seconds:.1f} s: tau {shown}")
            result["runs"].append({"loss": name, "seed": seed, "steps": steps, "seconds": seconds, "tau": row})
            parts.write(options.json, result)
    header = ["loss", "seeds", "steps", *(f"{mode}, T = {temperature:g}" for mode, temperature in COLUMNS)]
    rows = [
        [name, str(len(taus[name])), f"{statistics.mean(steps_of[name]):.0f}", *map(spread, zip(*taus[name], strict=True))]
        for name in names
        if taus[name]
    ]
    print(markdown(header, rows), flush=True)
    return 0


def spread(values: Sequence[float]) -> str:
    """Mean and half the range."""
    return f"{statistics.mean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


if __name__ == "__main__":
    sys.exit(main())
