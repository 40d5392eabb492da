"""State that every test starts from; options and markers are those of the project's own pytest plugin."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from compile_guard import pytest_plugin
from tests.threads import Puppet

if TYPE_CHECKING:
    import torch


pytest_plugins = ["pytester"]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Put the plugin in where the project is not installed, and its entry point unknown."""
    if not pluginmanager.has_plugin("compile_guard"):
        pluginmanager.register(pytest_plugin, "compile_guard")


@pytest.fixture(autouse=True)
def _environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches of the shell that started pytest do not reach the tests."""
    monkeypatch.delenv("COMPILE_GUARD", raising=False)
    monkeypatch.delenv("COMPILE_GUARD_SUPPRESSIONS", raising=False)
    monkeypatch.delenv("COMPILE_GUARD_TRACE", raising=False)


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
def devices(logical_devices: list[torch.device]) -> list[torch.device]:
    """At least two devices: real GPUs, else the logical ones that `--logical-devices N` asks for."""
    return logical_devices


@pytest.fixture
def num_iterations(stress_iterations: int) -> int:
    """Iterations of a stress test."""
    return stress_iterations


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
