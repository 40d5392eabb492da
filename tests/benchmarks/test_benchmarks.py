import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.drafter_step import flop
from benchmarks.measure import Timing, markdown
from dflash_train.config_files import load_config

ROOT = Path(__file__).parents[2]


def test_the_flop_rule_gives_the_published_figure_and_is_linear_in_sequences() -> None:
    """72 TFLOP for a sequence of the Qwen3-8B drafter: SpecForge's 172 ms at 422 TFLOP/s."""
    config = load_config("qwen3-8b").drafter
    assert flop(config, 1) == pytest.approx(0.172 * 422e12, rel=0.01)
    assert flop(config, 2) == pytest.approx(2 * flop(config, 1))


def test_a_timing_is_its_median_and_half_its_range() -> None:
    timing = Timing(rounds=[10.0, 8.0, 12.0])
    assert (timing.median, timing.spread) == (10.0, 0.2)
    assert timing.as_dict()["ms"] == 10.0


def test_tables_are_markdown() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_pipeline_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks.pipeline", "--size", "tiny", "--steps", "8", "--limit", "1"]
    command += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert result["pipeline"]["alone"]["expected_tok_s"] > 0
    assert result["environment"]["command"].startswith("python -m benchmarks.pipeline")


SHORT = ["--unguarded=1", "--guarded=1", "--at-once=2"]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("trainer_27b", []),
        pytest.param("trainer_gemma", [*SHORT, "--timeout=300", "--limit=900"], marks=pytest.mark.stress),
    ],
)
def test_the_trainers_checks_run_without_a_gpu(module: str, options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", f"benchmarks.{module}", "--steps", "4", "--json", str(tmp_path / "out.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "compiles after the warm-up" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))[module]
    runs = [result] if module == "trainer_27b" else [value for value in result.values() if value and "step" in value]
    assert {run["step"] for run in runs} in ({4}, {4, 8})  # comparisons have 8 at least
    assert all(run["tok_s"] > 0 and run["findings"] == [] for run in runs)


def test_where_a_late_process_was_is_shown(tmp_path: Path) -> None:
    from benchmarks.processes import last_stacks, run_process

    source = tmp_path / "late.py"
    source.write_text(
        "import threading\nfrom benchmarks.processes import dump_when_late\nprint('step 3', flush=True)\ndump_when_late()\n"
        "def waits_for_ever():\n    threading.Event().wait()\n"
        "threading.Thread(target=waits_for_ever, daemon=True).start()\nthreading.Event().wait()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = run_process([sys.executable, str(source)], environ, tmp_path / "log", 12.0)
    assert ended.late
    shown = last_stacks(ended.text)
    assert shown[0] == "step 3"
    assert any("waits_for_ever" in line for line in shown)
    assert sum(line.startswith(("Thread", "Current thread")) for line in shown) == 2


def test_how_a_process_ended_is_told(tmp_path: Path) -> None:
    from benchmarks.processes import run_process

    def how(code: str) -> str:
        return run_process([sys.executable, "-c", code], os.environ, tmp_path / "log", 60.0).how

    assert how("print('fine')") == "finished"
    assert how("raise ValueError('no such thing')") == "exit 1: ValueError: no such thing"


def test_lines_of_a_file_are_selected_from_1_on(tmp_path: Path) -> None:
    from benchmarks.road_parts import select_lines

    source = tmp_path / "a.jsonl"
    source.write_text("".join(f"{n}\n" for n in range(1, 11)), "utf-8")
    assert select_lines(f"{source}:3-5", tmp_path).read_text("utf-8") == "3\n4\n5\n"
    assert select_lines(str(source), tmp_path) == source


def test_the_road_and_the_losses_run_without_a_gpu(tmp_path: Path) -> None:
    """From prompts to figures and an export, on the tiny target; the second script takes the first one's data."""
    pytest.importorskip("transformers")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt {n}"]}) + "\n" for n in range(24)), "utf-8")
    judge = ["--judge", f"{prompts}:17-24", "--judge-prompts", "2", "--judge-tokens", "12"]
    run = ["--target", "tiny", "--preset", "tiny-cpu", "--dtype", "float32", *judge]
    road = ["--prompts", f"{prompts}:1-16", "--work", str(tmp_path / "work"), "--answer-tokens", "40", "--no-peer"]
    road += ["--regenerate-seconds", "1", "--train-seconds", "1", "--timed-prompts", "1", "--temperatures", "0.7,0"]
    losses = ["--data", str(tmp_path / "work" / "data"), "--losses", "ce,kl", "--seeds", "1", "--seconds", "1"]
    for name, options in (("road", road), ("losses", losses)):
        command = [sys.executable, "-m", f"benchmarks.{name}", *run, *options, "--json", str(tmp_path / f"{name}.json")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "road.json").read_text("utf-8"))
    assert {"tau at T = 0.7: ddtree over chain", "tau at T = 0.0: chain over prompt lookup"} <= result["goals"].keys()
    assert {row["mode"] for row in result["speed/0.7"]} == {"ar", "chain", "ddtree", "lookup", "generate"}
    assert (tmp_path / "work" / "export" / "config.json").is_file()
    assert {run["loss"] for run in json.loads((tmp_path / "losses.json").read_text("utf-8"))["runs"]} == {"ce", "kl"}


def test_the_script_for_several_gpus_runs_with_logical_devices(tmp_path: Path) -> None:
    """Its stage of two processes, which says whether they train as one."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [ROOT / "benchmarks" / "multigpu.sh", tmp_path, "--logical-devices=2", "--stages=hosts,copies", "--steps=3"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "multigpu.json").read_text("utf-8"))["multigpu"]
    assert len(result["hosts"]["losses"]["two"]) == 3
    assert result["hosts"]["largest_relative_difference"] < 1e-5
