"""Compiled steps write what eager ones write, and compile once for a shape."""

from __future__ import annotations

from typing import Any

import pytest
from decoding import TARGETS, random_prompts, tiny_decoder

from dflash_train import caches
from dflash_train.decode import DecodeConfig

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_compiled_steps_write_what_eager_ones_write_and_compile_once(
    name: str, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(caches._OPTIONS, "backend", "aot_eager")  # with Inductor on the CPU this takes minutes
    caches._compile.cache_clear()
    decoder = tiny_decoder(TARGETS[name])
    config = DecodeConfig(max_new_tokens=10)
    prompts, others = random_prompts(2, seed=3), random_prompts(2, seed=4, longest=20)
    plain = [[g.tokens for g in decoder.generate(p, "ddtree", config, budget=8).generations] for p in (prompts, others)]
    decoder.compile = True
    assert [g.tokens for g in decoder.generate(prompts, "ddtree", config, budget=8).generations] == plain[0]
    steps = [caches._compile(step) for step in (caches._pass_of_target, caches._pass_of_drafter)]

    def versions() -> list[int]:
        return [info.num_entries for step in steps for info in step.cache_info().values()]  # type: ignore[attr-defined]

    assert versions() == [1, 1]
    with guard.sealed():
        assert [g.tokens for g in decoder.generate(others, "ddtree", config, budget=8).generations] == plain[1]
    assert versions() == [1, 1]
    assert not [finding for finding in guard.findings() if not finding.prevented]
    caches._compile.cache_clear()
