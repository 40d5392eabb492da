"""State that every test starts from, and the options of the suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.threads import Puppet

if TYPE_CHECKING:
    import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("compile_guard")
    group.addoption(
        "--logical-devices",
        type=int,
        default=0,
        metavar="N",
        help="give tests marked multigpu N logical devices on one GPU or the CPU where there are no two GPUs",
    )
    group.addoption(
        "--stress-iterations",
        type=int,
        default=40,
        metavar="N",
        help="iterations of each test marked stress (40; 1000 is what the project promises)",
    )


@pytest.fixture(autouse=True)
def _environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches of the shell that started pytest do not reach the tests."""
    monkeypatch.delenv("COMPILE_GUARD", raising=False)
    monkeypatch.delenv("COMPILE_GUARD_SUPPRESSIONS", raising=False)


@pytest.fixture
def clean() -> Iterator[None]:
    """No guard, no findings and no compiled code, before and after."""
    import torch

    import compile_guard

    def sweep() -> None:
        compile_guard.uninstall()
        compile_guard.findings.clear()
        compile_guard.findings.suppress(frozenset())
        compile_guard.findings.mode = "warn"
        torch._dynamo.reset()

    sweep()
    yield
    sweep()


@pytest.fixture
def guard(clean: None) -> Any:
    """The guard installed in mode `record`, with no findings; it is taken out after the test."""
    import compile_guard

    compile_guard.install(mode="record")
    return compile_guard


@pytest.fixture
def devices(request: pytest.FixtureRequest) -> list[torch.device]:
    """At least two devices: real GPUs, else the logical ones that `--logical-devices N` asks for."""
    import torch

    if torch.cuda.device_count() >= 2:
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    num_logical: int = request.config.getoption("--logical-devices")
    if num_logical < 2:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}; --logical-devices N (at least 2) makes do with one")
    return [torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")] * num_logical


@pytest.fixture
def num_iterations(request: pytest.FixtureRequest) -> int:
    """Iterations of a stress test."""
    num: int = request.config.getoption("--stress-iterations")
    return num


@pytest.fixture
def puppet() -> Iterator[Callable[[], Puppet]]:
    """Makes threads that do as they are told."""
    made: list[Puppet] = []
    numbers = itertools.count()

    def make() -> Puppet:
        made.append(Puppet(f"puppet-{next(numbers)}"))
        return made[-1]

    yield make
    for each in made:
        each.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is none."""
    if not any(item.get_closest_marker("cuda") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
