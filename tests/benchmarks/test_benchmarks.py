import json
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


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("trainer_27b", []),
        pytest.param("trainer_gemma", ["--unguarded=1", "--at-once=2"], marks=pytest.mark.stress),
    ],
)
def test_the_trainers_checks_run_without_a_gpu(module: str, options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", f"benchmarks.{module}", "--steps", "4", "--json", str(tmp_path / "out.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "compiles after the warm-up" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))[module]
    runs = [result] if module == "trainer_27b" else [value for value in result.values() if value and "step" in value]
    assert runs
    assert all(run["step"] == 4 and run["tok_s"] > 0 and run["findings"] == [] for run in runs)
