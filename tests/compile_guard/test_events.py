"""The event log: what is written, when it may be written, and that a program goes on without it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_guard import events
from compile_guard.entry import gate
from compile_guard.events import LOG, EventLog, now_ns
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.report.event_log import read
from compile_guard.tracing import TRACE_LOCK
from tests.threads import run_in_threads, until

install = sys.modules["compile_guard.install"]  # the package's attribute of that name is the function
SCHEMA = json.loads(files("compile_guard.report").joinpath("events.schema.json").read_text(encoding="utf-8"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.ndjson")) for line in file.read_text().splitlines()]


def a_finding(subject: str = "f", *, prevented: bool = True) -> Finding:
    return Finding(
        code="fx-flag",
        subject=subject,
        title="a title",
        now=this_thread("calls f"),
        shared="a flag",
        consequence="an error",
        fix="install",
        prevented=prevented,
    )


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    """A log of its own in `tmp_path / "log"`, which no producer but the test and findings writes to."""
    log = EventLog()
    log.open(str(tmp_path / "log"), lambda: False)
    yield log
    log.close()


@pytest.fixture
def logged_guard(clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The guard, logging into the folder that is given."""
    import compile_guard

    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "log"))
    compile_guard.install(mode="record")
    yield tmp_path / "log"
    compile_guard.uninstall()


def test_no_file_before_the_first_event_and_one_with_rank_and_pid_after_it(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert not (tmp_path / "log").exists()
    log.emit("trace", now_ns(), what="fx.Tracer.trace")
    (file,) = (tmp_path / "log").iterdir()
    assert file.name.startswith(f"rank3-pid{os.getpid()}-")
    assert [event["kind"] for event in lines(tmp_path / "log")] == ["process", "trace"]


def test_every_event_of_a_threaded_run_is_as_the_schema_says(logged_guard: Path) -> None:
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager", dynamic=False)

    def work() -> None:
        for size in range(1, 4):
            compiled(torch.ones(size, requires_grad=True)).backward()
        torch.fx.symbolic_trace(lambda x: x + 1)

    run_in_threads(work, work)
    findings.report(a_finding(prevented=False))
    torch._dynamo.reset()
    if (child := os.fork()) == 0:
        torch.fx.symbolic_trace(lambda x: x + 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    written = lines(logged_guard)
    validator = pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)
    for event in written:
        validator.validate(event)
    assert {event["kind"] for event in written} >= {"process", "lock_hold", "trace", "compile", "reset", "finding", "fork"}
    backwards = [event for event in written if event["kind"] == "compile" and event["what"] == "a backward"]
    assert backwards
    assert {event["thread"] for event in written} >= {"body-0", "body-1", "MainThread"}


def test_the_schema_refuses_what_is_no_event(log: EventLog, tmp_path: Path) -> None:
    log.emit("trace", now_ns(), what="make_fx")
    good = lines(tmp_path / "log")[-1]
    validator = pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)
    assert validator.is_valid(good)
    without_what = {key: good[key] for key in good if key != "what"}
    for bad in ({**good, "kind": "nap"}, {**good, "dur_ns": -1}, {**good, "v": 2}, without_what):
        assert not validator.is_valid(bad)


def test_a_wait_is_logged_with_whom_it_waited_for_and_the_hold_that_ended_it(logged_guard: Path, puppet: Any) -> None:
    holder, waiter = puppet(), puppet()
    holder.do(TRACE_LOCK.acquire, "a trace")
    got = waiter.start(TRACE_LOCK.acquire, "another")
    until(lambda: TRACE_LOCK.statistics().num_waiting)
    holder.do(TRACE_LOCK.release)
    assert got.result()
    waiter.do(TRACE_LOCK.release)
    run = read(logged_guard)
    (wait,) = run.spans("wait")
    assert (wait["thread"], wait["subject"], wait["holders"]) == ("puppet-1", "the trace lock", ["puppet-0"])
    ((released, taken),) = run.handovers()
    assert (released["thread"], released["what"]) == ("puppet-0", "a trace")
    assert (taken["thread"], taken["what"]) == ("puppet-1", "another")


@pytest.mark.parametrize("lock", ["the trace lock", "the gate", "install"])
def test_nothing_is_written_while_the_thread_holds_a_lock_of_ours(logged_guard: Path, lock: str) -> None:
    holds: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "the trace lock": lambda: TRACE_LOCK.hold("a trace"),
        "the gate": lambda: gate.shut(lambda code: False),
        "install": lambda: install._install_lock,
    }
    with holds[lock]():
        findings.report(a_finding())
        assert not list(logged_guard.glob("*"))
    LOG.emit("fork")  # the next event, with no lock in hand
    assert {event["kind"] for event in lines(logged_guard)} >= {"process", "finding", "fork"}


def test_an_event_from_within_the_writing_is_queued_and_written(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler or a finalizer may do it."""
    write = os.write
    interrupted: list[bool] = []

    def interrupted_write(file: int, data: bytes) -> int:
        if not interrupted:
            interrupted.append(True)
            log.emit("fork")
        return write(file, data)

    monkeypatch.setattr(os, "write", interrupted_write)
    log.emit("trace", now_ns(), what="make_fx")
    assert [event["kind"] for event in lines(tmp_path / "log")] == ["process", "trace", "fork"]


@pytest.mark.parametrize("failure", ["no space", "unwritable"])
def test_a_log_that_cannot_be_written_is_one_warning_and_the_program_goes_on(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    if failure == "unwritable":
        (tmp_path / "log").write_text("a file where the folder should be")
    else:

        def full(file: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        log.emit("fork")
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert not log.on


def test_a_file_that_is_full_counts_what_it_does_not_take(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_BYTES", 2000)
    for _ in range(100):
        log.emit("trace", now_ns(), what="make_fx")
    log.close()
    written = lines(tmp_path / "log")
    assert written[-1]["kind"] == "dropped"
    assert written[-1]["num_events"] + len(written) - 2 == 100
    assert read(tmp_path / "log").num_dropped == written[-1]["num_events"]


def test_broken_lines_are_skipped_and_counted(log: EventLog, tmp_path: Path) -> None:
    for _ in range(3):
        log.emit("fork")
    (file,) = (tmp_path / "log").iterdir()
    good = file.read_bytes().splitlines(keepends=True)
    broken = [good[1][:20] + b"\n", b"\xff\xfe\n", b"[]\n", b'{"v":1}\n']
    file.write_bytes(b"".join([good[0], *broken, b'{"v":7,"kind":"new"}\n', good[2], good[3][:-9]]))
    run = read(tmp_path / "log")
    assert [event["kind"] for event in run.events] == ["process", "fork"]
    assert (run.num_broken, run.num_newer) == (5, 1)


def test_a_finding_is_told_in_full_once_and_counted(log: EventLog, tmp_path: Path) -> None:
    with findings.watch("record"):
        for _ in range(50):
            findings.report(a_finding("often"))
        findings.report(a_finding("often", prevented=False))
    log.close()
    written = [event for event in lines(tmp_path / "log") if event["kind"] == "finding"]
    assert sum("now" in event for event in written) == 2
    assert sum(event["times"] for event in written) == 51
    assert len(written) < 20, "one that repeats fills the file"
    (found,) = read(tmp_path / "log").findings()
    assert (found.key, found.count, found.prevented, found.now.doing) == ("fx-flag:often", 51, False, "calls f")


def test_events_of_many_threads_are_all_written(log: EventLog, tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait(60)
        for _ in range(500):
            log.emit("trace", now_ns(), what="make_fx")

    run_in_threads(*[work] * 4)
    log.flush()
    assert len(read(tmp_path / "log").spans("trace")) == 2000


def test_without_the_variable_nothing_is_logged(guard: Any) -> None:
    torch.fx.symbolic_trace(lambda x: x + 1)
    assert not LOG.on


def test_uninstall_ends_the_log(logged_guard: Path) -> None:
    import compile_guard

    assert LOG.on
    compile_guard.uninstall()
    assert not LOG.on
