"""The pytest plugin: tests under the guard, their findings told, and devices for tests of several.

    pytest --compile-guard=raise            every test under the guard; a finding that happens fails its test
    def test_threads(compile_guard): …      this test under the guard; the fixture is the list of its findings

Importing it imports no torch, and a test that asks for none of this is left alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from compile_guard.findings import MODES, Finding, FindingError, Mode, check_mode, findings
from compile_guard.install import install, is_installed, uninstall

if TYPE_CHECKING:
    import torch

_MARKERS = (
    "compile_guard(mode='raise'): run this test under the guard; off, record, warn or raise",
    "multigpu(min=2): skip this test where there are fewer devices; see the fixture logical_devices",
    "stress: runs many times over; see the fixture stress_iterations",
)
_SECTION = "compile_guard"
_found = pytest.StashKey[list[Finding]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, and ini keys of the same names."""
    group = parser.getgroup("compile_guard")
    group.addoption(
        "--compile-guard", choices=MODES, metavar="MODE", help=f"run every test under the guard: {', '.join(MODES)}"
    )
    group.addoption(
        "--logical-devices", type=int, metavar="N", help="devices where there are no two GPUs: one GPU or the CPU, N times"
    )
    group.addoption("--stress-iterations", type=int, metavar="N", help="iterations of a test marked stress (40)")
    parser.addini(
        "compile_guard", "mode in which every test runs under the guard; none: only those that ask for it", default=""
    )
    parser.addini("logical_devices", "what --logical-devices says", default="0")
    parser.addini("stress_iterations", "what --stress-iterations says", default="40")


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known, and refuse bad settings before anything runs."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        _mode_of_session(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    _number(config, "logical_devices", 0)
    _number(config, "stress_iterations", 1)


def _mode_of_session(config: pytest.Config) -> Mode | None:
    mode: Mode | None = config.getoption("--compile-guard")
    said: str = config.getini("compile_guard")
    return mode or (check_mode(said, "ini key compile_guard") if said else None)


def _number(config: pytest.Config, name: str, least: int) -> int:
    option = config.getoption(f"--{name.replace('_', '-')}")
    said: Any = config.getini(name) if option is None else option
    try:
        number = int(said)
    except ValueError:
        raise pytest.UsageError(f"ini key {name} must be a number, got {said!r}") from None
    if number < least:
        raise pytest.UsageError(f"{name} must be at least {least}, got {number}")
    return number


def _mode_of(item: pytest.Item) -> Mode | None:
    """The mode that a test runs in: its marker's, the session's, or `record` where it asks for the fixture; None: no guard."""
    marker = item.get_closest_marker("compile_guard")
    if marker is not None:
        mode = marker.kwargs.get("mode", marker.args[0] if marker.args else "raise")
        return check_mode(mode, f"marker compile_guard(mode=) of {item.nodeid}")
    mode = _mode_of_session(item.config)
    return "record" if mode is None and "compile_guard" in getattr(item, "fixturenames", ()) else mode


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Put the guard in for the test, fixtures included, and take it out where it was not in before."""
    try:
        mode = _mode_of(item)
    except ValueError:
        mode = None  # told by the set-up, as an error of this test
    if mode is None:
        return (yield)
    was_installed, mode_before = is_installed(), findings.mode
    with ExitStack() as stack:
        if mode == "off":
            if was_installed:
                uninstall()
                stack.callback(install)
        else:
            install(mode)
            # Where it was in already, it stays, in the mode that it had.
            stack.callback(setattr, findings, "mode", mode_before)
            if not was_installed:
                stack.callback(uninstall)
        item.stash[_found] = stack.enter_context(findings.watch(mode))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `multigpu` test where there are too few devices; report a bad marker."""
    try:
        _mode_of(item)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)
    marker = item.get_closest_marker("multigpu")
    if marker is not None:
        _share(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the test's findings to its last report: as properties, which JUnit shows, and as a section."""
    if call.when == "teardown":
        for finding in _once_each(item.stash.get(_found, [])):
            outcome = "prevented" if finding.prevented else "happened"
            item.user_properties.append((f"compile_guard.{outcome}", f"{finding.key} | {finding.title}"))
            item.add_report_section("teardown", f"{_SECTION} {finding.key}", str(finding))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """In mode `raise`, fail a test that passed though a finding happened: one raised in a thread may have been lost there."""
    result = yield
    happened = [finding for finding in item.stash.get(_found, []) if not finding.prevented]
    if happened and _mode_of(item) == "raise":
        raise FindingError(happened[0])
    return result


def _once_each(found: list[Finding]) -> list[Finding]:
    return list({(finding.key, finding.prevented): finding for finding in found}.values())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A section that lists findings with the tests that had them, those that happened first and in full."""
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    texts: dict[str, str] = {}
    # (Among the groups is that of deselected tests, which are no reports.)
    for report in (each for group in terminalreporter.stats.values() for each in group):
        if not isinstance(report, pytest.TestReport) or report.when != "teardown":
            continue
        for name, value in report.user_properties:
            root, _, outcome = name.partition(".")
            if root == _SECTION:
                tests[outcome, str(value)].append(report.nodeid)
        texts |= dict(report.sections)
    if not tests:
        return
    terminalreporter.section(_SECTION)
    for (outcome, value), nodes in sorted(tests.items()):
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        terminalreporter.write_line(f"{outcome}: {value} ({nodes[0]}{more})")
        if outcome == "happened":
            terminalreporter.write_line(texts.get(f"Captured {_SECTION} {value.partition(' | ')[0]} teardown", ""))
    num_happened = sum(outcome == "happened" for outcome, _ in tests)
    terminalreporter.write_line(f"{num_happened} happened, {len(tests) - num_happened} prevented")


@pytest.fixture
def compile_guard(request: pytest.FixtureRequest) -> list[Finding]:
    """Runs the test under the guard: the findings of it so far, by any thread, in a list that grows."""
    found: list[Finding] | None = request.node.stash.get(_found, None)
    if found is None:
        pytest.fail("ask for the fixture compile_guard as an argument: the guard goes in before the test begins", pytrace=False)
    return found


@pytest.fixture
def logical_devices(request: pytest.FixtureRequest) -> list[torch.device]:
    """At least two devices for this test: GPUs, shared out among xdist's workers, else what `--logical-devices N` makes up."""
    return _share(request.node)


@pytest.fixture
def stress_iterations(request: pytest.FixtureRequest) -> int:
    """How often a test marked `stress` shall do what it does: `--stress-iterations`."""
    return _number(request.config, "stress_iterations", 1)


def _share(item: pytest.Item) -> list[torch.device]:
    """The devices that this worker may use for a test.

    Raises:
        pytest.skip.Exception: the machine has too few.
        pytest.fail.Exception: the machine has enough, but this worker's share of them is too small.
    """
    import torch

    marker = item.get_closest_marker("multigpu")
    least: int = marker.kwargs.get("min", marker.args[0] if marker.args else 2) if marker is not None else 2
    num_gpus = torch.cuda.device_count()
    num_logical = _number(item.config, "logical_devices", 0)
    worker, num_workers = _worker()
    own = [torch.device("cuda", index) for index in range(worker, num_gpus, num_workers)]
    if len(own) >= least:
        return own
    if num_logical >= least:
        return [own[0] if own else torch.device("cuda", 0) if num_gpus else torch.device("cpu")] * num_logical
    if num_gpus >= least:
        pytest.fail(
            f"worker {worker + 1} of {num_workers} has {len(own)} of {num_gpus} GPUs, and the test needs {least}: "
            f"run with -n {num_gpus // least}, or with --logical-devices {least}",
            pytrace=False,
        )
    pytest.skip(f"needs {least} GPUs, found {num_gpus}; --logical-devices N (at least {least}) makes do with one, or the CPU")


def _worker() -> tuple[int, int]:
    """Number of this xdist worker and of all; 0 of 1 without xdist."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
