"""Several processes by `torchrun`, here on one machine with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, column, largest_difference, same_bits, small_run, weights_of
from test_resume import all_state

LIMIT_S = 90
SCRIPT = """
import os, signal, sys
from dflash_train import cli, trainer

first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
original = trainer._Run._combine

def combine(run):
    if first_life and run.hosts.rank == int(os.environ["WHO"]) and run.progress.step == int(os.environ["DIE_AT"]):
        if os.environ["HOW"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a drafter broke")
    original(run)

trainer._Run._combine = combine
sys.exit(cli.main(sys.argv[1:]))
"""


def torchrun(
    data: Path, run: Path, *settings: str, die_at: int = -1, restarts: int = 0, who: int = 1, how: str = "kill"
) -> subprocess.CompletedProcess[str]:
    """Two processes; rank `who` kills itself, or fails, in step `die_at` of its first life."""
    script = run.with_suffix(".py")
    script.write_text(SCRIPT)
    overrides = [f"--set={setting}" for setting in (f"data.path={data}", *SMALL, *settings)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2"]
    fate = {"DIE_AT": str(die_at), "WHO": str(who), "HOW": how}
    return subprocess.run(
        [*launcher, f"--max-restarts={restarts}", str(script), "train", "tiny-cpu", "-o", str(run), "--resume", *overrides],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **fate, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("mode", [[], ["train.synchronise=weights", "train.average_every=3"]])
def test_two_processes_train_as_one_with_two_drafters(mode: list[str], tiny_data: Path, tmp_path: Path) -> None:
    done = torchrun(tiny_data, tmp_path / "two", *mode)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("2 hosts; 4 rows of 96 tokens a step") == 1  # rank 0 alone speaks
    small_run(tiny_data, tmp_path / "one", "train.drafter_devices=cpu,cpu", *mode)
    assert column(tmp_path / "two", "loss") == pytest.approx(column(tmp_path / "one", "loss"), rel=1e-6)
    assert column(tmp_path / "two", "step") == list(range(1, 9))
    difference = largest_difference(weights_of(tmp_path / "two", 8), weights_of(tmp_path / "one", 8))
    print(f"\n  weights differ by {difference:.1e} at most")
    assert difference < 1e-6
    # Eight steps end within a window of averaging: each process has written its own drafter.
    files = json.loads((tmp_path / "two" / "step-000008" / "meta.json").read_text())["files"]
    assert sum(name.startswith("replica-") for name in files) == (2 if mode else 1)


def test_a_rank_that_is_killed_comes_back_and_the_run_ends_as_an_unbroken_one(tiny_data: Path, tmp_path: Path) -> None:
    settings = ["train.save_every=2"]
    done = torchrun(tiny_data, tmp_path / "broken", *settings, die_at=5, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from" in done.stderr
    small_run(tiny_data, tmp_path / "unbroken", "train.drafter_devices=cpu,cpu", *settings)
    assert same_bits(all_state(tmp_path / "broken", 8), all_state(tmp_path / "unbroken", 8))
    assert column(tmp_path / "broken", "loss") == column(tmp_path / "unbroken", "loss")


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_on_one_host_is_saved_by_the_first_and_gone_on_from(who: int, tiny_data: Path, tmp_path: Path) -> None:
    """No checkpoint was due before: the restarted processes begin at the step that rank 0 saved when the failure came."""
    done = torchrun(tiny_data, tmp_path / "broken", die_at=5, restarts=1, who=who, how="raise")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "failed after step 5: ValueError: a drafter broke" in done.stderr
    assert ("Rank 0 has the same step" in done.stderr) == (who == 1)
    assert f"resuming from {tmp_path / 'broken' / 'step-000005'}" in done.stderr
    small_run(tiny_data, tmp_path / "unbroken", "train.drafter_devices=cpu,cpu")
    assert same_bits(all_state(tmp_path / "broken", 8), all_state(tmp_path / "unbroken", 8))


@pytest.mark.stress
def test_a_rank_that_is_gone_for_good_ends_the_others(tiny_data: Path, tmp_path: Path) -> None:
    done = torchrun(tiny_data, tmp_path / "run", "train.save_every=2", die_at=5)
    assert done.returncode != 0
    assert (tmp_path / "run" / "step-000004" / "meta.json").is_file()
