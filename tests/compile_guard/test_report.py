"""Reports of a run's event logs: what each shows, that it may be opened anywhere, and that it is quick."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_guard import cli, events
from compile_guard.events import EventLog, now_ns
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.report import html as page
from compile_guard.report import timeline
from compile_guard.report.event_log import Run, read

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</pre><script>alert(1)</script>"

PROGRAM = """
import threading, torch
def train(number):
    w = torch.randn(4, 4, requires_grad=True)
    step = torch.compile(lambda x, w: (x @ w).relu().sum() + number, backend="aot_eager", dynamic=False)
    for size in range(1, 4):
        step(torch.ones(size, 4), w).backward()
def trace():
    torch.fx.symbolic_trace(torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(20)]))
threads = [threading.Thread(target=train, args=(n,), name=f"trainer-{n}") for n in range(3)]
threads += [threading.Thread(target=trace, name="exporter")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
torch._dynamo.config.recompile_limit = 1
step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
for n in range(1, 4):
    step(torch.ones(n))
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The event logs of one real threaded run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "compile_guard", "run", "--mode", "record", "--trace", str(folder / "log")]
    subprocess.run([*command, str(folder / "train.py")], check=True, timeout=240, cwd=ROOT, capture_output=True)
    return folder / "log"


@pytest.fixture(scope="module")
def run(logs: Path) -> Run:
    return read(logs)


def rows(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def assert_spans_nest(spans: list[dict[str, Any]]) -> None:
    """In each lane a span either contains another one or does not touch it; compared in whole nanoseconds."""
    lanes: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for span in spans:
        begin, length = round(span["ts"] * 1000), round(span["dur"] * 1000)
        lanes[span["pid"], span["tid"]].append((begin, begin + length, span["name"]))
    for lane in lanes.values():
        open_until: list[tuple[int, str]] = []
        for begin, end, name in sorted(lane, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1][0] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1][0], f"{name} crosses the end of {open_until[-1][1]}"
            open_until.append((end, name))


def test_timeline_has_a_named_lane_for_each_thread_by_native_id(run: Run) -> None:
    names = {row["tid"]: row["args"]["name"] for row in rows(timeline.as_trace(run), "M") if row["name"] == "thread_name"}
    assert set(names.values()) >= {"trainer-0", "trainer-1", "trainer-2", "exporter", "MainThread"}
    assert all(0 < tid < 2**32 for tid in names)
    assert {row["tid"] for row in rows(timeline.as_trace(run), "X")} <= set(names)


def test_timeline_spans_nest(run: Run) -> None:
    spans = rows(timeline.as_trace(run), "X")
    assert {span["cat"] for span in spans} >= {"lock_hold", "wait", "compile", "trace"}
    assert_spans_nest(spans)


def test_the_check_of_nesting_finds_spans_that_cross() -> None:
    span = {"pid": 1, "tid": 1, "name": "a"}
    with pytest.raises(AssertionError, match="crosses the end"):
        assert_spans_nest([span | {"ts": 0.0, "dur": 2.0}, span | {"ts": 1.0, "dur": 2.0}])


def test_timeline_arrows_go_from_the_releaser_to_the_waiter(run: Run) -> None:
    trace = timeline.as_trace(run)
    begins, ends = ({row["id"]: row for row in rows(trace, phase)} for phase in "sf")
    assert begins
    assert begins.keys() == ends.keys()
    holds = [span for span in rows(trace, "X") if span["cat"] == "lock_hold"]
    waited = [event for event in run.spans("lock_hold") if event["waited"]]
    assert len(begins) == len(waited)
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for arrow in (begin, end):
            assert any(
                hold["tid"] == arrow["tid"] and hold["ts"] <= arrow["ts"] <= hold["ts"] + hold["dur"] for hold in holds
            ), "an arrow that no viewer can bind to a span"


def test_timeline_shows_findings_as_instants(run: Run) -> None:
    instants = [row for row in rows(timeline.as_trace(run), "i") if row["cat"] == "finding"]
    assert len(instants) == len(run.spans("finding"))
    assert "recompile-limit (happened)" in {row["name"] for row in instants}
    assert {row["s"] for row in instants} == {"t"}


def test_timeline_merges_with_torch_profiler(guard: Any, tmp_path: Path) -> None:
    log = EventLog()
    log.open(str(tmp_path / "log"), lambda: False)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]) as profile, torch.profiler.record_function("the block"):
        with findings.watch("record"):
            findings.report(a_finding("f"))
        torch.ones(100, 100) @ torch.ones(100, 100)
    log.close()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    timeline.write(read(tmp_path / "log"), tmp_path / "both.trace.json", tmp_path / "profile.json")
    both = json.loads((tmp_path / "both.trace.json").read_text())
    (block,) = [row for row in both["traceEvents"] if row.get("name") == "the block" and row["ph"] == "X"]
    (instant,) = [row for row in both["traceEvents"] if row.get("cat") == "finding"]
    assert (instant["pid"], instant["tid"]) == (block["pid"], block["tid"]), "one thread, two lanes"
    assert block["ts"] <= instant["ts"] <= block["ts"] + block["dur"], "the clocks differ"


def a_finding(subject: str, *, prevented: bool = True) -> Finding:
    return Finding(
        code="fx-flag",
        subject=subject,
        title=f"of {subject}",
        now=this_thread(subject),
        shared=subject,
        consequence=subject,
        fix=subject,
        prevented=prevented,
    )


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(text)
    return parser.seen


def test_html_needs_no_network_and_has_no_scripts(run: Run) -> None:
    text = page.as_html(run)
    seen = tags(text)
    assert not {tag for tag, _ in seen} & {"script", "link", "img", "iframe", "object"}
    links = [attributes[name] for _, attributes in seen for name in ("href", "src") if name in attributes]
    assert links
    assert not [link for link in links if link and (":" in link or link.startswith("/"))]
    assert "url(" not in text
    assert "@import" not in text


def test_html_shows_findings_waits_and_compiles(run: Run) -> None:
    text = page.as_html(run)
    for finding in run.findings():
        assert finding.code in text
    for thread in ("trainer-0", "trainer-1", "trainer-2", "exporter"):
        assert text.count(thread) >= 2
    assert "2 happened." in text
    assert "<svg" in text


def test_html_escapes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog()
    log.open(str(tmp_path / "log"), lambda: False)
    monkeypatch.setattr(sys, "argv", [HOSTILE])
    monkeypatch.setattr(threading.current_thread(), "_name", HOSTILE)
    with findings.watch("record"):
        findings.report(a_finding(HOSTILE))
    began = now_ns()
    log.emit("compile", began, what=HOSTILE, where=HOSTILE, outcome=HOSTILE)
    log.emit("lock_hold", began, what=HOSTILE, lock=HOSTILE, number=1, waited=False)
    log.emit("wait", began, subject=HOSTILE, holders=[HOSTILE])
    log.close()
    text = page.as_html(read(tmp_path / "log"))
    assert "alert(1)" in text
    assert "script" not in {tag for tag, _ in tags(text)}
    assert "</pre><script>" not in text


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_html_opens_in_a_browser_without_a_complaint(logs: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(logs), "-o", str(tmp_path / "out")]) == 1
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *options, "--enable-logging=stderr", "--dump-dom", (tmp_path / "out" / "index.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "trainer-2" in done.stdout
    assert "CONSOLE" not in done.stderr
    heads = [text for text in ("Threads", "Findings", "Lock waits", "Compiles", "Data") if f"<h2>{text}</h2>" in done.stdout]
    assert len(heads) == 5


def test_report_writes_a_folder_and_says_1_where_a_finding_happened(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["report", str(logs), "-o", str(out)]) == 1
    assert {entry.name for entry in out.iterdir()} == {"index.html", "report.txt", "timeline.trace.json", "events"}
    assert capsys.readouterr().out == (out / "report.txt").read_text()
    assert cli.main(["report", str(logs), "-o", str(out)]) == 2
    assert f"{out} exists; pass --overwrite" in capsys.readouterr().err
    assert cli.main(["report", str(out / "events"), "-o", str(out), "--overwrite"]) == 1
    assert read(out / "events").events == read(logs).events


def test_overwrite_leaves_a_folder_alone_that_is_no_report(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert cli.main(["report", str(logs), "-o", str(tmp_path), "--overwrite"]) == 2
    assert "holds something else than a report (thesis.tex)" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda folder: None, "is not a folder"),
        (lambda folder: folder.mkdir(), "has no event log"),
        (lambda folder: (folder.mkdir(), (folder / "a.ndjson").write_text("{\n")), "no event that can be read (1 broken"),
    ],
)
def test_report_of_nothing_is_a_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, said: str
) -> None:
    prepare(tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"), [("no json", "cannot be read"), ("{}", "has no list"), ('{"traceEvents":[]}', "when it began")]
)
def test_merge_with_what_is_no_profile_writes_nothing(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "profile.json").write_text(text)
    arguments = ["report", str(logs), "-o", str(tmp_path / "out"), "--merge", str(tmp_path / "profile.json")]
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_clean_run_is_status_0(tmp_path: Path) -> None:
    log = EventLog()
    log.open(str(tmp_path / "log"), lambda: False)
    with findings.watch("record"):
        findings.report(a_finding("f"))
    log.close()
    assert cli.main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "out")]) == 0


def test_a_run_into_a_folder_that_holds_another_ones_log_stops_before_it_begins(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise AssertionError('ran')")
    assert cli.main(["run", "--trace", str(logs), str(program)]) == 2
    assert "holds the log of an earlier run" in capsys.readouterr().err


def test_ten_minutes_with_100_000_events_are_reported_in_10_s_from_50_mb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are the product's promise: `python -m pytest -k 100_000 -s` prints what they are here."""
    monkeypatch.setattr(events, "REPEAT_S", 0.0)
    log = EventLog()
    log.open(str(tmp_path / "log"), lambda: False)
    with findings.watch("record"):
        for number in range(25_000):
            began = now_ns()
            where = "/home/somebody/a/project/with/a/long/path/to/its/training/program.py:1234"
            log.emit("trace", began, what="fx.Tracer.trace")
            log.emit("compile", began, what=f"block_{number % 200}", where=where, outcome="compiled")
            log.emit("lock_hold", began, lock="the trace lock", what="torch.compile of block", number=number + 1, waited=True)
            findings.report(a_finding(f"function {number % 100}"))
    log.close()
    (file,) = (tmp_path / "log").iterdir()
    _stretch(file, 600 * 10**9)
    assert len(read(tmp_path / "log").events) > 100_000
    size = file.stat().st_size
    began = time.perf_counter()
    assert cli.main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "out")]) == 0
    spent = time.perf_counter() - began
    page_size = (tmp_path / "out" / "index.html").stat().st_size
    print(f"\n100,000 events: log {size / 1e6:.1f} MB, report {spent:.1f} s, page {page_size / 1e6:.2f} MB")
    assert size < 50e6
    assert spent < 10


def _stretch(file: Path, length_ns: int) -> None:
    """Spread the events of a log over so much time."""
    written = [json.loads(line) for line in file.read_text().splitlines()]
    for number, event in enumerate(written):
        event["t_ns"] = written[0]["t_ns"] + length_ns * number // len(written)
    file.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in written))
