"""Findings: what a mode does with them, how they read, and how they are silenced."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from compile_guard.findings import (
    Actor,
    Finding,
    FindingError,
    Findings,
    GuardWarning,
    mode_from_environment,
    other_thread,
    stack_of,
    suppressions_from_environment,
    this_thread,
)
from tests.threads import run_in_threads, wait


def found(code: str = "fx-flag", subject: str = "f", *, prevented: bool = False, **fields: Any) -> Finding:
    fields = {
        "title": "two traces overlap",
        "now": Actor("worker-1", 4712, "enters fx.symbolic_trace", ("train.py:88 in step",)),
        "shared": "the flag",
        "consequence": "an error",
        "fix": "warm up first",
    } | fields
    return Finding(code=code, subject=subject, prevented=prevented, **fields)


@pytest.fixture
def findings() -> Findings:
    made = Findings()
    made.mode = "record"
    return made


def test_record_keeps_one_finding_for_each_code_and_subject_with_a_count(findings: Findings) -> None:
    for subject in ("f", "f", "g"):
        findings.report(found(subject=subject))
    assert [(each.key, each.count) for each in findings()] == [("fx-flag:f", 2), ("fx-flag:g", 1)]


def test_off_keeps_nothing(findings: Findings) -> None:
    findings.mode = "off"
    findings.report(found())
    assert findings() == []


def test_warn_warns_the_first_time_only(findings: Findings) -> None:
    findings.mode = "warn"
    with pytest.warns(GuardWarning, match="two traces overlap"):
        findings.report(found())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        findings.report(found())


def test_raise_raises_each_time_and_the_error_holds_the_finding(findings: Findings) -> None:
    findings.mode = "raise"
    for _ in range(2):
        with pytest.raises(FindingError, match="two traces overlap") as caught:
            findings.report(found())
        assert caught.value.finding.key == "fx-flag:f"


@pytest.mark.parametrize("mode", ["warn", "raise"])
def test_prevented_findings_are_kept_and_never_warned_of_nor_raised(findings: Findings, mode: Any) -> None:
    findings.mode = mode
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        findings.report(found(prevented=True))
    assert len(findings()) == 1


def test_a_finding_that_happened_is_not_hidden_by_one_that_was_prevented(findings: Findings) -> None:
    findings.mode = "warn"
    findings.report(found(prevented=True))
    with pytest.warns(GuardWarning):
        findings.report(found(prevented=False))
    findings.report(found(prevented=True))
    assert [(each.prevented, each.count) for each in findings()] == [(False, 3)]


def test_text_follows_the_grammar() -> None:
    other = Actor("exporter", 4709, "is inside torch.export", ("export.py:31 in run",), for_s=1.3)
    assert str(found(other=other, count=3)).splitlines() == [
        "compile_guard: two traces overlap [fx-flag] (happened, 3 times)",
        "  now   thread worker-1 (tid 4712) enters fx.symbolic_trace",
        "          train.py:88 in step",
        "  while thread exporter (tid 4709) is inside torch.export since 1.3 s",
        "          export.py:31 in run",
        "  Shared: the flag",
        "  Leads to: an error",
        "  Fix: warm up first",
        "  Off: COMPILE_GUARD=off    Suppress: add `fx-flag:f` to the file that COMPILE_GUARD_SUPPRESSIONS names",
    ]


def test_text_of_a_prevented_finding_says_what_the_guard_took_away() -> None:
    text = str(found(prevented=True))
    assert "(prevented)" in text
    assert "  Without the guard: an error" in text
    assert "while" not in text


def test_stacks_show_the_program_and_not_the_guard() -> None:
    actor = this_thread("tests")
    assert actor.thread == threading.current_thread().name
    assert actor.tid == threading.get_native_id()
    assert re.search(r"test_findings\.py:\d+ in test_stacks_show", actor.stack[-1])


def test_other_thread_is_named_with_the_stack_it_has_now() -> None:
    there, seen = threading.Event(), threading.Event()
    ident: list[int] = []

    def stand_here() -> None:
        ident.append(threading.get_ident())
        there.set()
        wait(seen)

    def look() -> Actor | None:
        wait(there)
        try:
            return other_thread(ident[0], "stands", 2.0)
        finally:
            seen.set()

    actor = run_in_threads(stand_here, look)[1]
    assert actor.thread == "body-0"
    assert actor.for_s == 2.0
    assert any("in stand_here" in row for row in actor.stack)
    assert other_thread(None, "nobody") is None


def test_a_thread_that_has_ended_is_still_described() -> None:
    actor = other_thread(1, "is gone")
    assert actor is not None
    assert (actor.thread, actor.tid, actor.stack) == ("ident 1", 0, ())


@pytest.mark.parametrize("key", ["fx-flag", "fx-flag:f"])
def test_suppressed_codes_and_keys_are_dropped(findings: Findings, key: str) -> None:
    findings.suppress(frozenset({key}))
    findings.report(found())
    findings.report(found(code="stall"))
    assert [each.code for each in findings()] == ["stall"]


def test_watch_collects_what_any_thread_reports_inside_the_block(findings: Findings) -> None:
    findings.mode = "raise"
    with findings.watch("record") as seen:
        run_in_threads(lambda: findings.report(found()))
    assert [each.key for each in seen] == ["fx-flag:f"]
    assert findings.mode == "raise"
    with pytest.raises(FindingError):
        findings.report(found())
    assert len(seen) == 1


def test_watch_gives_the_mode_back_when_its_block_raises(findings: Findings) -> None:
    with pytest.raises(KeyError), findings.watch("off"):
        raise KeyError
    assert findings.mode == "record"


def test_watch_names_the_good_modes_for_a_bad_one(findings: Findings) -> None:
    with (
        pytest.raises(ValueError, match=r"must be one of off, record, warn, raise, got 'loud'"),
        findings.watch(
            "loud"  # type: ignore[arg-type]
        ),
    ):
        pass
    findings.mode = "record"


def test_a_listener_hears_each_report_until_it_ends(findings: Findings) -> None:
    heard: list[Finding] = []
    end = findings.listen(heard.append)
    findings.report(found())
    findings.report(found())
    end()
    findings.report(found())
    assert len(heard) == 2


def test_clear_forgets_so_that_the_next_one_warns_again(findings: Findings) -> None:
    findings.mode = "warn"
    with pytest.warns(GuardWarning):
        findings.report(found())
    findings.clear()
    assert findings() == []
    with pytest.warns(GuardWarning):
        findings.report(found())


def test_the_number_of_different_findings_is_bounded(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Findings.__module__], "_MAX_RECORDED", 3)
    for number in range(5):
        findings.report(found(subject=str(number)))
    findings.report(found(subject="0"))
    assert [each.count for each in findings()] == [2, 1, 1]


def test_reports_of_many_threads_are_all_counted(findings: Findings) -> None:
    run_in_threads(*[lambda: [findings.report(found()) for _ in range(200)]] * 4)
    assert [each.count for each in findings()] == [800]


def test_environment_beats_code_and_a_bad_value_lists_the_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode_from_environment("record") == "record"
    monkeypatch.setenv("COMPILE_GUARD", "raise")
    assert mode_from_environment("record") == "raise"
    monkeypatch.setenv("COMPILE_GUARD", "loud")
    with pytest.raises(ValueError, match=r"COMPILE_GUARD must be one of off, record, warn, raise, got 'loud'"):
        mode_from_environment("record")


def test_suppressions_file_has_a_key_a_line_and_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "suppressions.txt"
    file.write_text("# known\nstall\n\nfx-flag:f  # until June\n")
    monkeypatch.setenv("COMPILE_GUARD_SUPPRESSIONS", str(file))
    assert suppressions_from_environment() == {"stall", "fx-flag:f"}
    monkeypatch.delenv("COMPILE_GUARD_SUPPRESSIONS")
    assert suppressions_from_environment() == frozenset()


def test_suppressions_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing.txt"
    monkeypatch.setenv("COMPILE_GUARD_SUPPRESSIONS", str(missing))
    with pytest.raises(ValueError, match=r"missing\.txt.*cannot be read"):
        suppressions_from_environment()


def test_a_stack_shows_the_program_not_our_frames_nor_what_torch_calls_of_the_standard_library() -> None:
    import linecache

    import torch

    from compile_guard.torch_seams import configuration

    frames: list[Any] = []

    def called_from(*files: str) -> tuple[str, ...]:
        """The stack of a chain of functions in these files, outermost first, as far as it is not this test's own."""
        call: Any = lambda: frames.append(sys._getframe(1))  # noqa: E731
        for file in reversed(files):
            namespace = {"call": call}
            exec(compile("def called(): call()", file, "exec"), namespace)
            call = namespace["called"]
        call()
        return tuple(row.rsplit(":", 1)[0] for row in stack_of(frames.pop()) if row.endswith(" in called"))

    ours, hazard = configuration.__file__, str(Path(configuration.__file__).parents[1] / "hazards" / "fx_race.py")
    in_torch, in_standard_library = torch.__file__, linecache.__file__
    assert called_from("train.py", ours, "model.py") == ("train.py", "model.py")
    assert called_from("train.py", in_torch, in_standard_library) == ("train.py", in_standard_library)
    assert called_from("train.py", in_standard_library, "model.py") == ("train.py", "model.py")
    assert called_from(hazard, in_torch) == (hazard, in_torch)
