"""Channels, the crew, and who reads what."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import small_config

from dflash_train.config import ConfigError
from dflash_train.crew import Channel, Clock, Crew, Meeting, Stopped
from dflash_train.data import Documents
from dflash_train.devices import parse_devices
from dflash_train.packing import PackedDocuments
from dflash_train.pipeline import Source, Topology

CPU = torch.device("cpu")
WAIT_S = 20.0


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(8)), st.integers(1, 8))
def test_items_come_out_in_order_whatever_order_they_are_put_in(order: list[int], depth: int) -> None:
    channel: Channel[str] = Channel(depth)
    putters = [threading.Thread(target=channel.put, args=(number, str(number)), daemon=True) for number in order]
    for thread in putters:
        thread.start()
    got = [channel.get() for _ in range(8)]
    joined(*putters)
    assert got == [(number, str(number)) for number in range(8)]


def test_a_full_channel_holds_up_all_but_the_next_item() -> None:
    channel: Channel[str] = Channel(2)
    channel.put(1, "b")
    put = threading.Event()

    def put_beyond() -> None:
        channel.put(2, "c")
        put.set()

    thread = threading.Thread(target=put_beyond, daemon=True)
    thread.start()
    channel.put(0, "a")  # the next one is never held up, or nothing would move
    assert not put.is_set()
    assert channel.get() == (0, "a")
    assert put.wait(WAIT_S)
    joined(thread)
    channel.finish(3)
    assert [channel.get() for _ in range(3)] == [(1, "b"), (2, "c"), None]


def test_closing_a_channel_ends_all_waits_in_it() -> None:
    empty: Channel[int] = Channel(1)
    full: Channel[int] = Channel(1)
    full.put(0, 0)
    ended: list[str] = []

    def expect_stop(name: str, wait: object) -> None:
        try:
            wait()  # type: ignore[operator]
        except Stopped:
            ended.append(name)

    threads = [
        threading.Thread(target=expect_stop, args=("get", empty.get), daemon=True),
        threading.Thread(target=expect_stop, args=("put", lambda: full.put(1, 1)), daemon=True),
    ]
    for thread in threads:
        thread.start()
    empty.close()
    full.close()
    joined(*threads)
    assert sorted(ended) == ["get", "put"]


def outcomes(meeting: Meeting, parties: int) -> tuple[list[threading.Thread], list[str]]:
    """Start threads that meet once; how each came out of it."""
    found: list[str] = []

    def meet() -> None:
        try:
            meeting.wait()
            found.append("met")
        except Stopped:
            found.append("stopped")
        except KeyError:
            found.append("failed")

    threads = [threading.Thread(target=meet, daemon=True) for _ in range(parties)]
    for thread in threads:
        thread.start()
    return threads, found


def test_a_meeting_that_is_closed_while_its_action_runs_still_takes_place_for_all() -> None:
    acting, go_on = threading.Event(), threading.Event()

    def action() -> None:
        acting.set()
        assert go_on.wait(WAIT_S)

    meeting = Meeting(3, action)
    threads, found = outcomes(meeting, 3)
    assert acting.wait(WAIT_S)
    meeting.close()
    assert found == []
    go_on.set()
    joined(*threads)
    assert found == ["met"] * 3
    with pytest.raises(Stopped):
        meeting.wait()


def test_a_meeting_that_is_closed_before_all_have_come_takes_place_for_none() -> None:
    meeting = Meeting(3, lambda: pytest.fail("it took place"))
    threads, found = outcomes(meeting, 2)
    meeting.close()
    joined(*threads)
    assert found == ["stopped"] * 2


def test_a_meeting_whose_action_fails_ends_for_the_others_too() -> None:
    def action() -> None:
        raise KeyError("broken")

    threads, found = outcomes(Meeting(3, action), 3)
    joined(*threads)
    assert sorted(found) == ["failed", "stopped", "stopped"]


def test_threads_meet_again_and_again() -> None:
    met: list[int] = []
    here = [0, 0, 0]

    def action() -> None:
        met.append(min(here))
        assert len(set(here)) == 1

    meeting = Meeting(3, action)

    def work(index: int) -> None:
        for _ in range(200):
            here[index] += 1
            meeting.wait()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert met == list(range(1, 201))


def test_the_first_failure_stops_the_crew_and_is_the_cause() -> None:
    crew = Crew()
    channel: Channel[int] = Channel(1)
    crew.on_stop(channel.close)

    def fail(clock: Clock) -> None:
        raise KeyError("broken")

    def wait(clock: Clock) -> None:
        channel.get()

    crew.add("waits", CPU, wait)
    crew.add("fails", CPU, fail)
    crew.start()
    assert crew.wait(WAIT_S)
    assert crew.join() == []
    assert isinstance(crew.cause, KeyError)
    assert crew.failed == "fails"


def test_a_thread_that_does_not_end_is_named_and_its_stack_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_train.crew.JOIN_S", 0.2)
    release = threading.Event()
    crew = Crew()

    def does_not_listen(clock: Clock) -> None:
        release.wait(WAIT_S)

    crew.add("deaf", CPU, does_not_listen)
    crew.start()
    crew.stop("main", ValueError("enough"))
    assert crew.join() == ["deaf"]
    assert "in does_not_listen" in capfd.readouterr().err
    release.set()
    assert crew.wait(WAIT_S)


def sources(data: Path, drafters: int, hosts: int, *overrides: str, place: int = 0) -> list[Source]:
    config = small_config(data, *overrides)
    rows = PackedDocuments(Documents(data), config.data.row_length)
    return [Source(rows, config, Topology(drafters_here=drafters, hosts=hosts, rank=i), 0, place) for i in range(hosts)]


def rows_of_step(all_hosts: list[Source], step: int, accumulation: int, drafters: int) -> list[tuple[int, ...]]:
    """The documents of every row of a step, as a set in a canonical order."""
    per_step = accumulation * drafters
    rows: list[tuple[int, ...]] = []
    for source in all_hosts:
        for number in range(step * per_step, (step + 1) * per_step):
            batch = source.batch(number)
            assert batch.step == step
            rows += batch.rows.document_numbers
    return sorted(rows)


@pytest.mark.parametrize(
    ("drafters", "hosts", "accumulation", "rows"), [(4, 1, 1, 1), (1, 1, 1, 4), (1, 1, 4, 1), (2, 2, 1, 1), (1, 2, 2, 1)]
)
def test_every_topology_reads_the_same_rows_in_a_step(
    drafters: int, hosts: int, accumulation: int, rows: int, tiny_data: Path
) -> None:
    plain = sources(tiny_data, 1, 1, "data.rows_per_batch=4")
    settings = (f"data.rows_per_batch={rows}", f"train.accumulation={accumulation}")
    others = sources(tiny_data, drafters, hosts, *settings)
    for step in (0, 1, 5):
        expected = rows_of_step(plain, step, 1, 1)
        assert rows_of_step(others, step, accumulation, drafters) == expected


def test_a_source_begins_anywhere(tiny_data: Path) -> None:
    (whole,) = sources(tiny_data, 2, 1)
    config = small_config(tiny_data)
    rows = PackedDocuments(Documents(tiny_data), config.data.row_length)
    later = Source(rows, config, Topology(drafters_here=2), 3, 3 * whole.rows_per_step)
    assert len(later) == len(whole) - 6
    for number in range(4):
        a, b = later.batch(number), whole.batch(number + 6)
        assert a.step == b.step
        assert torch.equal(a.rows.tokens, b.rows.tokens)
        assert torch.equal(a.anchors.positions, b.anchors.positions)


def test_devices_are_read_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    gpus = [torch.device("cuda", i) for i in range(8)]
    assert parse_devices("0-4", "target") == gpus[:5]
    assert parse_devices("5-7", "drafter") == gpus[5:]
    assert parse_devices("2, 0", "drafter") == [gpus[2], gpus[0]]
    assert parse_devices("cuda:0,cuda:0", "drafter") == [gpus[0]] * 2
    assert parse_devices("cpu:0,cpu:1,cpu", "drafter") == [CPU] * 3
    assert parse_devices("auto", "target") == gpus[:5]
    assert parse_devices("auto", "drafter") == gpus[5:]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse_devices("auto", "target") == parse_devices("auto", "drafter") == gpus[:1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parse_devices("auto", "target") == [CPU]


@pytest.mark.parametrize("text", ["0", "cuda:3", "gpu", "", "4-2", "cpu,,cpu", "1-"])
def test_devices_that_are_not_there_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"train\.target_devices (is|names)"):
        parse_devices(text, "target")


def test_one_gpu_serves_targets_and_drafters_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_devices("auto", "target") == [torch.device("cuda", 0)]
    assert parse_devices("auto", "drafter") == [torch.device("cuda", 1)]
