"""The road from prompts to a measured speed-up, on one device: regenerate, prepare, train, judge, export; beside it
SpecForge's core, trained on the same data for the same seconds, where it is installed (`pip install --no-deps specforge`).

    python -m benchmarks.road --target gemma.gguf --preset gemma3-270m --template plain \
        --prompts gsm8k.jsonl:1-1000 --judge gsm8k.jsonl:1001-1319 humaneval.jsonl --work DIR [--json FILE]

Every drafter is judged on the same prompts: tau of chain and DDTree above temperature 0 by lossless sampling, at 0 only before
a text first repeats 16 tokens in a row, with prompt lookup beside it; then speed with one prompt at a time, against plain
decoding by the same loop and against `generate` of transformers. `--limit` ends what is not begun; figures are printed, and
written, as they come. With `--target tiny --preset tiny-cpu` all of it runs on a CPU in minutes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import compile_guard
from benchmarks import road_parts as parts
from benchmarks.measure import environment
from dflash_train.drafter_files import read_run, save_drafter
from dflash_train.evaluate import Row, decoder_of, format_table, list_ways
from dflash_train.export import export_run
from dflash_train.targets import load_target

GOALS = {
    "chain over SpecForge's": 1.08,
    "chain over prompt lookup": 1.3,
    "ddtree over chain": 1.25,
    "speed of the best over plain decoding": 1.8,
}


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages; 0 whatever the figures are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="DIR|GGUF|tiny")
    parser.add_argument("--preset", required=True, help="preset or file of settings of the run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=V", help="override a setting of the run")
    parser.add_argument("--template", help="a chat template, or plain, for a target that has none")
    parser.add_argument("--prompts", required=True, metavar="FILE[:FIRST-LAST]", help="to be answered and trained on")
    parser.add_argument("--judge", nargs="+", required=True, metavar="FILE[:FIRST-LAST]", help="to be judged on")
    parser.add_argument("--work", type=Path, help="folder that keeps target, data and runs; what is there is used again")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter (%(default)s)")
    parser.add_argument("--regenerate-seconds", type=float, default=40.0, help="for rounds of answers (%(default)s)")
    parser.add_argument("--regenerate-batch", type=int, default=1000, help="prompts at once (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=160, help="(%(default)s)")
    parser.add_argument("--answer-temperatures", type=numbers, default="0.7,1", help="by round (%(default)s)")
    parser.add_argument("--train-seconds", type=float, default=40.0, help="of steps, for each side (%(default)s)")
    parser.add_argument("--temperatures", type=numbers, default="0.7,1,0", help="judged at, in this order (%(default)s)")
    parser.add_argument("--budgets", default="64", help="nodes of trees (%(default)s)")
    parser.add_argument("--judge-prompts", type=int, default=32, help="of each file (%(default)s)")
    parser.add_argument("--judge-tokens", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--judge-batch", type=int, default=32, help="prompts at once, for tau (%(default)s)")
    parser.add_argument("--timed-prompts", type=int, default=2, help="of each file, one at a time (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the steps whose speed is measured")
    parser.add_argument("--no-peer", action="store_true", help="without SpecForge")
    parser.add_argument("--limit", type=float, default=290.0, help="seconds after which nothing new is begun (%(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    compile_guard.install("record")
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        return drive(options, options.work)
    with tempfile.TemporaryDirectory() as name:
        return drive(options, Path(name))


def drive(options: argparse.Namespace, work: Path) -> int:
    """All stages, in `work`."""
    clock = parts.Clock(options.limit)
    result: dict[str, Any] = {"environment": environment(), "budget": {k: str(v) for k, v in vars(options).items()}}
    clock.say(str(result["environment"]))
    config, words = make_data(options, work, clock, result)
    for name in ("probe", "ours", "export"):
        shutil.rmtree(work / name, ignore_errors=True)

    with clock.stage("probe of our step, compiles included"):
        step_s = parts.step_seconds(config, work / "probe")
    with clock.stage("training ours"):
        seconds, steps = parts.train_for(config, work / "ours", options.train_seconds, step_s, clock)
    clock.say(f"ours: {steps} steps in {seconds:.1f} s")
    result["ours"] = {"steps": steps, "seconds": round(seconds, 2)}
    target = load_target(config.target, config.drafter.taps, parts.DEVICE)
    sides = {"ours": decoder_of(target, config.drafter, read_run(work / "ours")[1])}
    if not options.no_peer and not clock.is_over("SpecForge"):
        try:
            with clock.stage("training SpecForge's core"):
                weights, steps = parts.train_specforge(config, target, seconds, clock)
        except ImportError as error:
            clock.say(f"SpecForge is left out: {error}")
        else:
            clock.say(f"SpecForge: {steps} steps in the same {seconds:.1f} s")
            result["specforge"] = {"steps": steps, "seconds": round(seconds, 2)}
            save_drafter(work / "specforge", weights, config)
            sides["specforge"] = decoder_of(target, config.drafter, weights)
    parts.write(options.json, result)

    judges = [parts.select_lines(source, work) for source in options.judge]
    prompts = parts.read_judges(judges, words, options.judge_prompts)
    few = parts.read_judges(judges, words, options.timed_prompts)
    budgets = [int(text) for text in options.budgets.split(",")]
    judged: dict[float, dict[str, list[Row]]] = {}
    for number, temperature in enumerate(options.temperatures):
        for side, decoder in sides.items():
            if clock.is_over(f"tau of {side} at T = {temperature}"):
                continue
            # Plain decoding has tau 1: it runs where its text is what the others' is compared with.
            modes = ["chain", "ddtree"] if side != "ours" else [*["ar"] * (not temperature), "chain", "ddtree", "lookup"]
            ways = list_ways(modes, budgets)
            with clock.stage(f"tau of {side} at T = {temperature}"):
                rows = parts.judge(
                    decoder, prompts, words, ways, temperature, options.judge_tokens, options.judge_batch
                )
            judged.setdefault(temperature, {})[side] = rows
            show(rows, result, f"tau/{side}/{temperature}")
            parts.write(options.json, result)
        if number == 0 and not clock.is_over("speed"):
            with clock.stage(f"speed, one prompt at a time, T = {temperature}"):
                ways = list_ways(["ar", "chain", "ddtree", "lookup", "generate"], budgets)
                sides["ours"].compile = options.compile
                timed = parts.judge(sides["ours"], few, words, ways, temperature, options.judge_tokens, 1, timed=True)
            sides["ours"].compile = False
            show(timed, result, f"speed/{temperature}")
            compare_speed(timed, clock, result)
            parts.write(options.json, result)
    for temperature, by_side in judged.items():
        compare_tau(by_side, temperature, clock, result)
    with clock.stage("export"):
        export_run(work / "ours", work / "export", format="z-lab", dtype="bfloat16", overwrite=True)
    result["seconds"] = clock.seconds
    parts.write(options.json, result)
    clock.say("done; the limit was "f"{options.limit:.0f} s")
    return 0


def make_data(options: argparse.Namespace, work: Path, clock: parts.Clock, result: dict[str, Any]) -> tuple[Any, Any]:
    """Settings of the run and the tokenizer, with target and data made, or found in `work`."""
    with clock.stage("target"):
        path = parts.convert_target(options.target, options.template, work / "target")
        words = parts.words_of(path, options.template)
    config = parts.run_config(options.preset, path, work / "data", options.dtype, options.set)
    if (work / "data").is_dir():
        clock.say(f"{work / 'data'} is used again")
        return config, words
    prompts = parts.select_lines(options.prompts, work)
    target = load_target(config.target, (), parts.DEVICE)
    with clock.stage("regenerate"):
        answers = parts.write_answers(
            prompts, target, words, work, temperatures=options.answer_temperatures, tokens=options.answer_tokens,
            batch_size=options.regenerate_batch, seconds=options.regenerate_seconds,
        )  # fmt: skip
    with clock.stage("prepare"):
        made = parts.prepare_answers(answers, words, work / "data")
    clock.say(f"{len(answers)} rounds of answers: {made}")
    result["data"] = {"rounds": len(answers), "documents": made}
    del target
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return config, words


def show(rows: Sequence[Row], result: dict[str, Any], name: str) -> None:
    result[name] = [asdict(row) for row in rows]
    print(format_table({"rows": result[name]}), flush=True)


def find(rows: Sequence[Row], mode: str) -> Row:
    """Of the trees the best one."""
    return max((row for row in rows if row.mode == mode and row.task == "all"), key=lambda row: row.tau or 0.0)


def compare_tau(by_side: dict[str, list[Row]], temperature: float, clock: parts.Clock, result: dict[str, Any]) -> None:
    """Ratios of tau with their goals."""
    if "ours" not in by_side:
        return
    ours = {mode: parts.tau(find(by_side["ours"], mode), temperature) for mode in ("chain", "ddtree", "lookup")}
    ratios = {
        "chain over prompt lookup": ours["chain"] / ours["lookup"],
        "ddtree over chain": ours["ddtree"] / ours["chain"],
    }
    if "specforge" in by_side:
        theirs = parts.tau(find(by_side["specforge"], "chain"), temperature)
        ratios["chain over SpecForge's"] = ours["chain"] / theirs
    told(ratios, f"tau at T = {temperature}", clock, result)


def compare_speed(rows: Sequence[Row], clock: parts.Clock, result: dict[str, Any]) -> None:
    """The faster of chain and tree, against plain decoding."""
    best = max(find(rows, mode).speedup or 0.0 for mode in ("chain", "ddtree"))
    told({"speed of the best over plain decoding": best}, "wall clock", clock, result)


def told(ratios: dict[str, float], where: str, clock: parts.Clock, result: dict[str, Any]) -> None:
    for name, value in ratios.items():
        goal = GOALS[name]
        verdict = "reached" if value >= goal else f"missed by {1 - value / goal:.0%}"
        clock.say(f"{where}: {name} {value:.2f}, goal {goal}: {verdict}")
        result.setdefault("goals", {})[f"{where}: {name}"] = {"value": round(value, 3), "goal": goal}


if __name__ == "__main__":
    sys.exit(main())
