"""What goes wrong ends the run soon, with its cause, and leaves a state to go on from."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
from runs import column, same_bits, small_run, weights_of
from test_resume import all_state

import compile_guard
from dflash_train import checkpoint, replicas, trainer
from dflash_train.checkpoint import checkpoints
from dflash_train.conversations import DataError
from dflash_train.pipeline import Source
from dflash_train.replica import Replica
from dflash_train.targets import Target
from dflash_train.trainer import TrainingError

TOPOLOGY = ["train.drafter_devices=cpu,cpu", "train.target_devices=cpu,cpu"]
LIMIT_S = 30.0


def failing(owner: type, name: str, when: Callable[[], bool], error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Have a method raise from the first call on for which `when` holds; the warm-up is left alone."""
    original = getattr(owner, name)

    def call(*arguments: object, **options: object) -> object:
        if threading.current_thread() is not threading.main_thread() and when():
            raise error
        return original(*arguments, **options)

    patch.setattr(owner, name, call)


def nth(number: int) -> Callable[[], bool]:
    count = 0

    def reached() -> bool:
        nonlocal count
        count += 1
        return count > number

    return reached


@pytest.mark.parametrize(
    ("owner", "method", "calls", "error", "thread"),
    [
        # Late enough for a step to be over: the reader is ten batches ahead at most.
        (Source, "batch", 15, DataError("shard-00000.safetensors cannot be read"), "reader"),
        (Target, "states", 9, RuntimeError("target broke"), "target"),
        (Replica, "accumulate", 9, ValueError("drafter broke"), "drafter"),
        (Replica, "accumulate", 9, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "drafter"),
        (Replica, "accumulate", 9, SystemExit(3), "drafter"),
    ],
)
def test_a_failing_thread_ends_the_run_with_its_cause_and_after_saving(
    owner: type, method: str, calls: int, error: BaseException, thread: str, tiny_data: Path, tmp_path: Path
) -> None:
    small_run(tiny_data, tmp_path / "unbroken", *TOPOLOGY)
    before = set(threading.enumerate())
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        failing(owner, method, nth(calls), error, patch)
        with pytest.raises(TrainingError) as caught:
            small_run(tiny_data, tmp_path / "run", *TOPOLOGY)
    assert time.monotonic() - began < LIMIT_S
    assert caught.value.__cause__ is error
    assert f"thread {thread}" in str(caught.value)
    assert str(error) in str(caught.value)
    left = [each.name for each in set(threading.enumerate()) - before if not each.name.startswith("checkpoint")]
    assert left == []
    (kept,) = checkpoints(tmp_path / "run")
    step = int(kept.name[len("step-") :])
    assert f"Step {step} was saved; --resume goes on from it" in str(caught.value)
    small_run(tiny_data, tmp_path / "run", *TOPOLOGY, resume=True)
    assert same_bits(all_state(tmp_path / "run", 8), all_state(tmp_path / "unbroken", 8))
    assert column(tmp_path / "run", "loss") == column(tmp_path / "unbroken", "loss")


def test_a_failure_while_weights_change_saves_nothing_and_names_the_last_checkpoint(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(Replica, "publish", nth(11), RuntimeError("mid-update"), patch)
        with pytest.raises(TrainingError) as caught:
            small_run(tiny_data, tmp_path / "run", *TOPOLOGY, "train.save_every=2")
    assert "stand at different steps, so nothing was saved now. step-000004 is complete" in str(caught.value)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000002", "step-000004"]


def test_a_failure_before_the_first_step_says_that_there_is_nothing(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(Source, "batch", nth(0), OSError("no disk"), monkeypatch)
    with pytest.raises(TrainingError, match=r"thread reader failed after step 0: OSError: no disk\. No checkpoint was"):
        small_run(tiny_data, tmp_path / "run", *TOPOLOGY)


def spoil(patch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Have the first drafter's gradient be infinite in the steps that `when` names."""
    original = trainer._Run._combine

    def spoiled(run: trainer._Run) -> None:
        if when(run.progress.step):
            run.replicas[0].gradients[3].fill_(float("inf"))
        original(run)

    patch.setattr(trainer._Run, "_combine", spoiled)


@pytest.mark.parametrize("mode", ["gradients", "weights"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    mode: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step: step in (2, 5))
    settings = [*TOPOLOGY, f"train.synchronise={mode}", "train.max_bad_steps=2", "train.save_every=1", "train.keep_last=9"]
    outcome = small_run(tiny_data, tmp_path / "run", *settings)
    assert outcome.progress.bad_steps == 2
    assert column(tmp_path / "run", "bad_steps") == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [norm is None for norm in column(tmp_path / "run", "grad_norm")] == [i in (2, 5) for i in range(8)]
    if mode == "gradients":
        assert same_bits(weights_of(tmp_path / "run", 2), weights_of(tmp_path / "run", 3))
    assert not same_bits(weights_of(tmp_path / "run", 3), weights_of(tmp_path / "run", 4))
    assert all(bool(weight.isfinite().all()) for weight in weights_of(tmp_path / "run", 8).values())


def test_too_many_bad_steps_in_a_row_end_the_run(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step: step >= 3)
    with pytest.raises(TrainingError, match="after step 6: FloatingPointError: 3 steps in a row had gradients that"):
        small_run(tiny_data, tmp_path / "run", *TOPOLOGY, "train.max_bad_steps=3", "train.save_every=3")
    assert same_bits(weights_of(tmp_path / "run", 3), weights_of(tmp_path / "run", 6))


def test_a_run_in_which_nothing_moves_is_ended_with_all_stacks(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A target that hangs."""
    release = threading.Event()
    monkeypatch.setattr("dflash_train.crew.JOIN_S", 0.5)
    original, hang = Target.states, nth(4)

    def states(target: Target, *arguments: torch.Tensor) -> object:
        if threading.current_thread() is not threading.main_thread() and hang():
            release.wait(60)
        return original(target, *arguments)

    monkeypatch.setattr(Target, "states", states)
    with pytest.raises(TrainingError, match="TimeoutError: no step ended within 2 s") as caught:
        small_run(tiny_data, tmp_path / "run", *TOPOLOGY, "train.stall_seconds=2")
    release.set()
    assert "in states" in capfd.readouterr().err
    assert "nothing was saved now" in str(caught.value)


def test_a_signal_during_the_warm_up_ends_the_run_before_it_starts(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Replica.accumulate
    calls = 0

    def accumulate(replica: Replica, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        signal.raise_signal(signal.SIGTERM)
        return original(replica, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "accumulate", accumulate)
    outcome = small_run(tiny_data, tmp_path / "run", *TOPOLOGY)
    assert calls == 1
    assert (outcome.signal, outcome.progress.step, outcome.checkpoint) == (signal.SIGTERM, 0, None)


def test_a_drafter_that_does_not_fit_is_told_before_the_run(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accumulate(replica: Replica, *arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Replica, "accumulate", accumulate)
    with pytest.raises(TrainingError, match=r"first batch failed on cpu: OutOfMemoryError: .* 2 GiB\. Nothing was trained"):
        small_run(tiny_data, tmp_path / "run", *TOPOLOGY)


def test_a_signal_during_a_compile_ends_the_run_when_the_compile_is_over(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    """It comes inside Inductor, while this thread holds the lock over torch's tracers."""
    original: Callable[..., object] = compile_fx.compile_fx
    seen: list[str | None] = []

    def compile_with_signal(*arguments: object, **options: object) -> object:
        if not seen:
            seen.append(compile_guard.trace_lock.statistics().doing)
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", compile_with_signal)
    outcome = small_run(tiny_data, tmp_path / "run", *TOPOLOGY, "train.compile=true")
    assert (outcome.signal, outcome.progress.step, outcome.checkpoint) == (signal.SIGTERM, 0, None)
    assert str(seen[0]).startswith("torch.compile of _run_drafter")
    assert compile_guard.trace_lock.statistics().owner is None
    monkeypatch.undo()
    assert small_run(tiny_data, tmp_path / "run", *TOPOLOGY, "train.compile=true", resume=True).progress.step == 8


@pytest.mark.parametrize("where", ["average", "snapshot", "write"])
def test_a_signal_during_averaging_or_a_save_ends_the_run_after_the_step(
    where: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = threading.Event()

    def with_signal(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if threading.current_thread() is not threading.main_thread() and not fired.is_set():
                fired.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            return original(*arguments, **options)

        return call

    owner, name = {"average": (replicas, "combine"), "snapshot": (replicas, "mean_of"), "write": (checkpoint, "_save")}[where]
    monkeypatch.setattr(owner, name, with_signal(getattr(owner, name)))
    settings = [*TOPOLOGY, "train.synchronise=weights", "train.average_every=3", "train.save_every=3", "train.steps=500"]
    outcome = small_run(tiny_data, tmp_path / "run", *settings)
    assert outcome.signal == signal.SIGTERM
    assert 3 <= outcome.progress.step <= 30
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.name == f"step-{outcome.progress.step:06d}"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_corrupt_shard_is_named(tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in tiny_data.iterdir():
        content = path.read_bytes()
        (data / path.name).write_bytes(content[:-9] if path.name.startswith("shard") else content)
    with pytest.raises(DataError, match=r"shard-00000\.safetensors cannot be read"):
        small_run(data, tmp_path / "run")
