"""F1: transformers builds a model under patches of the whole process; two threads take each other's, and leave them."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    if importlib.util.find_spec("transformers") is None:
        return Affected(True, "transformers is not installed here", runnable=False)
    return Affected(True, "transformers sets torch's default dtype, one for the process, while it builds a model")


def make_model(built: Any) -> Any:
    """A small model of transformers whose construction calls `built(config)` before it makes its layers."""
    import torch

    transformers: Any = importlib.import_module("transformers")

    class TinyConfig(transformers.PretrainedConfig):  # type: ignore[misc]
        model_type = "compile_guard_tiny"
        tie_word_embeddings = False

    class Tiny(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = TinyConfig
        config: Any

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            built(config)
            self.linear = torch.nn.Linear(4, 4)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            pass

    return TinyConfig, Tiny


def built_beside_another(*, at_once: bool) -> str | None:
    """Two threads build a model from a configuration, each in a dtype of its own; the first to begin ends first."""
    import torch

    auto_model: Any = importlib.import_module("transformers").AutoModel

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def built(config: Any) -> None:
        if not at_once:
            return
        if config.name == "first":
            first_in.set()
            wait(second_in)
        else:
            second_in.set()
            wait(first_out)

    config_class, model_class = make_model(built)
    auto_model.register(config_class, model_class)
    before = torch.get_default_dtype()
    dtypes = {"first": torch.bfloat16, "second": torch.float16}

    def build(name: str) -> torch.dtype:
        if name == "second" and at_once:
            wait(first_in)
        try:
            model = auto_model.from_config(config_class(name=name), dtype=dtypes[name])
        finally:
            if name == "first":
                first_out.set()
        dtype: torch.dtype = model.linear.weight.dtype
        return dtype

    if at_once:
        found = run_threads(first=lambda: build("first"), second=lambda: build("second"))
    else:
        found = run_threads(first=lambda: build("first")) | run_threads(second=lambda: build("second"))
    said = [
        f"a model built as {dtypes[name]} in one of two threads has weights of {found[name]}"
        for name in dtypes
        if found[name] != dtypes[name]
    ]
    if torch.get_default_dtype() != before:
        said.append(f"with both built, torch's default dtype is {torch.get_default_dtype()} for good, not {before}")
        torch.set_default_dtype(before)
    return "; ".join(said) or None


def loaded_beside_another() -> str | None:
    """Two threads load a model with `from_pretrained`; the first to begin ends first."""
    pretrained: Any = importlib.import_module("transformers").PreTrainedModel
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    loading = threading.local()

    def built(config: Any) -> None:
        name = getattr(loading, "name", None)
        if name == "first":
            first_in.set()
            wait(second_in)
        elif name == "second":
            second_in.set()
            wait(first_out)

    config_class, model_class = make_model(built)
    tie_weights = pretrained.tie_weights
    with tempfile.TemporaryDirectory() as folder:
        model_class(config_class()).save_pretrained(folder)

        def load(name: str) -> None:
            if name == "second":
                wait(first_in)
            loading.name = name
            try:
                model_class.from_pretrained(folder)
            finally:
                if name == "first":
                    first_out.set()

        run_threads(first=lambda: load("first"), second=lambda: load("second"))
    if pretrained.tie_weights is tie_weights:
        return None
    pretrained.tie_weights = tie_weights
    return "with both loaded, PreTrainedModel.tie_weights does nothing for good: tied heads of later models stay empty"


def trigger() -> str | None:
    said = [built_beside_another(at_once=True), loaded_beside_another()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    said = built_beside_another(at_once=False)
    if said is not None:
        raise AssertionError(said)


HAZARD = Hazard(
    id="F1",
    name="model_loading",
    title="Models of transformers built or loaded in threads take each other's dtype and patches",
    symptom=(
        "Weights in another dtype than asked for, or on `meta` (`Cannot copy out of meta tensor`); empty tied heads; every "
        "later module in half precision, hence NaN; no error when it happens."
    ),
    mechanism=(
        "While it builds a model, transformers sets torch's default dtype and replaces `PreTrainedModel.tie_weights`, "
        "`torch.nn.init` and `torch.linspace`; accelerate's `init_empty_weights` replaces `nn.Module.register_parameter`. "
        "All of that is the process's, and each puts back what it found: another thread's, where two overlap."
    ),
    links=("transformers#41782", "transformers#44940", "diffusers#14347", "peft#3605", "docling-serve#175"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("transformers_models", "accelerate_init"),
    finding="model-loading",
    fix="Install the guard, under which one model is built at a time; a plain nn.Module built beside one needs `exclusive`.",
)
