"""The main job, shown: one threaded training program without the guard, the same program under it, and the trainer.

    python repro/demo.py

Runs `repro/threaded_drafters.py`, which knows nothing of the guard, on what the machine has: compiled flex_attention on a
CUDA device, compiled SDPA on the CPU. Then `dflash-train` trains a compiled drafter in two threads, fed by two threads with a
tiny target that is made on the spot, decodes with it, and exports it. Exit status 0 when the guarded runs finished, the drafter
learnt, and decoding with it wrote what the target alone writes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "repro" / "threaded_drafters.py")
TIMEOUT_S = 110
RUN = ROOT / "build" / "demo-run"
BARE_RUNS = 3
"""The race is not lost in every run: so many are shown at most without the guard, until one fails."""


def run(command: list[str], cache: Path) -> tuple[int, str, float]:
    """Run with compile caches of its own; the exit status, everything printed, and the seconds it took."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def train() -> int:
    """A drafter for a tiny target, trained in threads; 0 if it learnt."""
    print("\n3. `dflash-train`: two target threads feed two drafter threads, compiled, on the CPU …", flush=True)
    shutil.rmtree(RUN, ignore_errors=True)
    command = [sys.executable, "-m", "dflash_train", "train", "tiny-cpu", "-o", str(RUN)]
    command += ["--target-devices", "cpu,cpu", "--drafter-devices", "cpu,cpu"]
    command += ["--set", "train.compile=true", "--set", "train.log_every=50"]
    with tempfile.TemporaryDirectory() as folder:
        status, output, seconds = run(command, Path(folder))
    print(f"   it ended with status {status} after {seconds:.0f} s:\n")
    print("\n".join(f"   {line}" for line in output.splitlines()))
    if status != 0:
        print("\nTraining failed, which should not be.")
        return 1
    figures = json.loads((RUN / "summary.json").read_text("utf-8"))["acceptance_teacher_forced"]
    learnt = figures["trained"] > figures["untrained"]
    print(f"\n   Accepted drafts a block, teacher-forced on its own training text: {figures['trained']:.2f} of 3 drafted,")
    print(f"   {figures['untrained']:.2f} before training.")
    return 0 if learnt else 1


def decode() -> int:
    """What the drafter is worth, and its export; 0 if decoding is lossless."""
    print("\n4. `dflash-train eval` and `export`: the same prompts without drafts, with a chain, with trees …", flush=True)
    report, program = RUN / "eval.json", [sys.executable, "-m", "dflash_train"]
    command = [*program, "eval", str(RUN), "--prompts", str(RUN / "data.prompts.jsonl"), "--limit", "8", "--batch-size", "8"]
    command += ["--mode", "ar,chain,ddtree", "--budget", "16,64", "--max-new-tokens", "48", "--json", str(report)]
    exported = [*program, "export", str(RUN), "--format", "z-lab", "-o", str(RUN / "export")]
    with tempfile.TemporaryDirectory() as folder:
        for each in (command, exported):
            status, output, _ = run([*each, "--device", "cpu"] if each is command else each, Path(folder))
            print("\n".join(f"   {line}" for line in output.splitlines()))
            if status != 0:
                print("\nThat failed, which should not be.")
                return 1
    rows = json.loads(report.read_text("utf-8"))["rows"]
    print("   tau is tokens per pass of the target, of 4 at most; `same`: texts equal to those without drafts, token by token.")
    print("   The greedy text of a random target can hardly be foretold, and its passes are cheap: no time is gained here.")
    return 0 if all(row["same_as_ar"] == row["prompts"] for row in rows) else 1


def main() -> int:
    """All runs, and what they showed in plain words."""
    import torch

    cuda = torch.cuda.is_available()
    arguments = [PROGRAM, "--timeout", str(TIMEOUT_S), "--snapshots"]
    arguments += [] if cuda else ["--steps", "4"]
    what = (
        "compiled flex_attention on the GPU"
        if cuda
        else "compiled SDPA layers on the CPU (flex_attention has no backward there)"
    )
    print(f"torch {torch.__version__}: three threads, each training a drafter with {what},")
    print("each tracing its drafter with torch.fx after every step. The program is repro/threaded_drafters.py.\n")
    with tempfile.TemporaryDirectory() as folder:
        print("1. Without the guard …", flush=True)
        for number in range(BARE_RUNS):
            bare, output, seconds = run([sys.executable, *arguments], Path(folder) / f"bare{number}")
            last = [line for line in output.strip().splitlines() if line.strip()][-1]
            if bare != 0:
                print(f"   it ended with status {bare} after {seconds:.0f} s: {last}")
                break
            print(f"   it happened to finish this time, in {seconds:.0f} s: {last}", flush=True)
        print("\n2. The same program, unchanged, under `compile-guard run` …", flush=True)
        guarded = [sys.executable, "-m", "compile_guard", "run", "--mode", "record", *arguments]
        status_guarded, output, seconds = run(guarded, Path(folder) / "guarded")
    _, _, report = output.partition("compile_guard report:")
    print(f"   it ended with status {status_guarded} after {seconds:.0f} s. The guard's report:\n")
    print("\n".join(f"   {line}" for line in ("compile_guard report:" + report).splitlines()))
    if status_guarded != 0:
        print("\nThe guarded run failed, which should not be. Its last lines:\n" + output[-3000:])
        return 1
    if train() != 0 or decode() != 0:
        return 1
    before = "failed" if bare else f"finished {BARE_RUNS} times, though nothing ensured that it would"
    print(f"\nShown: without the guard the program {before}; with it every thread finished every step, and the report names")
    print("each conflict that was taken out of the way; and a drafter trained in threads on top of that.")
    print("Next: `compile-guard doctor`, `python repro/fx_race.py`, `dflash-train train tiny-cpu -o runs/tiny`.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
