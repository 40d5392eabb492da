"""The pytest plugin, as another project meets it: each test runs pytest on a small project of its own."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OVER_THE_LIMIT = """
    import threading, torch
    def run_over_the_limit():
        torch._dynamo.reset()  # whose function went over the limit once says no more
        with torch._dynamo.config.patch(recompile_limit=1):
            step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
            for n in range(1, 4):
                step(torch.ones(n))
"""
FOUR_GPUS = """
    import torch
    torch.cuda.device_count = lambda: 4
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose pytest has the plugin from this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    # `-p` and not the entry point: the project need not be installed. Strict: markers must be known.
    return project.runpytest_subprocess(
        "-p", "no:compile_guard", "-p", "compile_guard.pytest_plugin", "--strict-markers", "-ra", *arguments, timeout=240
    )


def test_a_test_that_asks_for_nothing_is_left_alone_and_torch_is_not_imported(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys
        import pytest
        def test_plain():
            import compile_guard
            assert "torch" not in sys.modules
            assert not compile_guard.is_installed()
        @pytest.mark.stress
        def test_iterations(stress_iterations):
            assert stress_iterations == 7
        """
    )
    result = run(project, "--stress-iterations=7")
    result.assert_outcomes(passed=2)
    run(project, "-k", "plain").assert_outcomes(passed=1, deselected=1)
    result.stdout.no_fnmatch_line("*compile_guard ==*")


def test_fixture_is_the_findings_of_its_test_alone(project: pytest.Pytester) -> None:
    project.makepyfile(
        OVER_THE_LIMIT
        + """
    def test_first(compile_guard):
        thread = threading.Thread(target=run_over_the_limit)
        thread.start()
        thread.join()
        assert {finding.code for finding in compile_guard} == {"recompile-limit", "eager-call"}
    def test_second(compile_guard):
        assert compile_guard == []
    def test_without():
        import compile_guard
        assert not compile_guard.is_installed()
    """
    )
    result = run(project)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*= compile_guard =*", "happened: recompile-limit:<lambda> | *runs eager*test_first*"])
    result.stdout.fnmatch_lines(["  Fix: *", "2 happened, 0 prevented"])


@pytest.mark.parametrize("how", ["option", "ini", "marker"])
def test_in_mode_raise_a_finding_in_a_thread_fails_the_test(project: pytest.Pytester, how: str) -> None:
    marker = "    @pytest.mark.compile_guard(mode='raise')\n" if how == "marker" else ""
    project.makepyfile(
        "    import pytest\n"
        + OVER_THE_LIMIT
        + marker
        + """
    def test_in_thread():
        thread = threading.Thread(target=run_over_the_limit, daemon=True)
        threading.excepthook = lambda args: None
        thread.start()
        thread.join()
    @pytest.mark.compile_guard(mode="off")
    def test_off():
        import compile_guard
        assert not compile_guard.is_installed()
        run_over_the_limit()
    """
    )
    if how == "ini":
        project.makeini("[pytest]\ncompile_guard = raise\n")
    result = run(project, *(["--compile-guard=raise"] if how == "option" else []))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*FindingError: compile_guard: *runs eager from now on*"])


def test_junit_has_the_findings_as_properties(project: pytest.Pytester) -> None:
    project.makepyfile(OVER_THE_LIMIT + "\n    def test_first(compile_guard):\n        run_over_the_limit()\n")
    run(project, "--junitxml=junit.xml").assert_outcomes(passed=1)
    properties = ElementTree.parse(project.path / "junit.xml").getroot().iter("property")
    told = {(each.get("name"), (each.get("value") or "").split(" | ")[0]) for each in properties}
    assert told == {("compile_guard.happened", f"{code}:<lambda>") for code in ("recompile-limit", "eager-call")}


@pytest.mark.parametrize("arguments", [["--compile-guard=loud"], ["--logical-devices=-1"], ["--stress-iterations=0"]])
def test_a_bad_option_is_a_usage_error(project: pytest.Pytester, arguments: list[str]) -> None:
    project.makepyfile("def test_plain(): pass")
    assert run(project, *arguments).ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("ini", "said"),
    [
        ("compile_guard = loud", "ini key compile_guard must be one of off, record, warn, raise, got 'loud'"),
        ("stress_iterations = many", "ini key stress_iterations must be a number, got 'many'"),
    ],
)
def test_a_bad_ini_key_is_a_usage_error_that_says_what_is_good(project: pytest.Pytester, ini: str, said: str) -> None:
    project.makepyfile("def test_plain(): pass")
    project.makeini(f"[pytest]\n{ini}\n")
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}*"])


def test_a_bad_marker_fails_its_test_with_a_sentence(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.compile_guard(mode='loud')\ndef test_bad(): pass\ndef test_good(): pass\n")
    result = run(project)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*marker compile_guard(mode=) of *test_bad must be one of off, record, warn, raise, got 'loud'*"]
    )


MULTIGPU = """
import os, pytest
@pytest.mark.multigpu
def test_two(logical_devices):
    print("has", *logical_devices)
@pytest.mark.multigpu(min=3)
def test_three(logical_devices):
    assert len(logical_devices) >= 3
"""


def test_multigpu_is_skipped_with_a_reason_where_there_are_too_few(project: pytest.Pytester) -> None:
    project.makepyfile(MULTIGPU)
    project.makeconftest("import torch\ntorch.cuda.device_count = lambda: 0\n")
    result = run(project)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*needs 3 GPUs, found 0; --logical-devices N (at least 3)*"])
    run(project, "--logical-devices=2").assert_outcomes(passed=1, skipped=1)
    run(project, "--logical-devices=3").assert_outcomes(passed=2)


def test_without_xdist_a_test_has_all_gpus(project: pytest.Pytester) -> None:
    project.makepyfile(MULTIGPU)
    project.makeconftest(FOUR_GPUS)
    result = run(project, "-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*has cuda:0 cuda:1 cuda:2 cuda:3*"])


def test_each_xdist_worker_has_gpus_of_its_own_and_too_few_are_an_error(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    project.makeconftest(FOUR_GPUS)
    project.makepyfile(
        """
        import os, pathlib, pytest
        @pytest.mark.multigpu
        @pytest.mark.parametrize("number", range(8))
        def test_two(logical_devices, number):
            said = " ".join(map(str, logical_devices))
            pathlib.Path(os.environ["PYTEST_XDIST_WORKER"]).write_text(said)
        """
    )
    run(project, "-n2", "--dist=load").assert_outcomes(passed=8)
    assert {(project.path / name).read_text() for name in ("gw0", "gw1")} == {"cuda:0 cuda:2", "cuda:1 cuda:3"}
    result = run(project, "-n4")
    result.assert_outcomes(errors=8)
    result.stdout.fnmatch_lines(["*of 4 has 1 of 4 GPUs, and the test needs 2: run with -n 2, or with --logical-devices 2*"])


def test_findings_of_xdist_workers_are_in_the_section(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    project.makepyfile(
        OVER_THE_LIMIT
        + """
    import pytest
    @pytest.mark.parametrize("number", range(4))
    def test_each(compile_guard, number):
        run_over_the_limit()
        assert {finding.code for finding in compile_guard} == {"recompile-limit", "eager-call"}
    """
    )
    result = run(project, "-n2")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["happened: recompile-limit:<lambda> | * and 3 more)", "*Shared: *", "2 happened, 0 prevented"])
