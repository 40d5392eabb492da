"""`config.patch` of torch up to 2.11, where the configuration belongs to the process: each block has its values for itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code
from compile_guard.torch_seams.configuration import config_is_global

_LIVE = "_compile_guard_live"
_BASE = "user_override"


@dataclass(slots=True)
class _Patched:
    """One value that one `with config.patch(...)` has in force."""

    thread: int
    value: Any


def _own(live: list[_Patched]) -> _Patched | None:
    """The innermost of the calling thread."""
    me = threading.get_ident()
    return next((each for each in reversed(live) if each.thread == me), None)


def _override(unset: Any) -> property:
    """Stands for `_ConfigEntry.user_override`: what the calling thread has patched; else what another has at this moment, as
    torch has it; else what was assigned."""

    def get(entry: Any) -> Any:
        state = entry.__dict__
        live = state.get(_LIVE)
        return (_own(live) or live[-1]).value if live else state.get(_BASE, unset)

    def assign(entry: Any, value: Any) -> None:
        own = _own(entry.__dict__.get(_LIVE, []))
        if own is None:
            entry.__dict__[_BASE] = value
        else:
            own.value = value  # undone with the block, as torch does

    return property(get, assign)


def _entry_of(module: Any, name: str) -> tuple[Any, Any]:
    """The entry behind a name, and its module: some are aliases of others."""
    getattr(module, name)  # says so where there is none
    entry = module._config[name]
    while entry.alias is not None:
        module, name = module._get_alias_module_and_name(entry)
        entry = module._config[name]
    return module, entry


def _config_patches(patches: Patches) -> None:
    from torch._dynamo import utils as dynamo_utils
    from torch._higher_order_ops import utils as hop_utils
    from torch.utils import _config_module

    make_patch = _config_module.ConfigModule.patch
    patches.set_attribute(_config_module._ConfigEntry, "user_override", _override(_config_module._UNSET_SENTINEL))

    def patch(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make_patch(self, *args, **kwargs)
        cls = type(made)  # made for this call alone
        entered: list[list[tuple[Any, Any, _Patched]]] = []

        def enter(block: Any) -> None:
            me = threading.get_ident()
            values = [(*_entry_of(self, name), _Patched(me, value)) for name, value in block.changes.items()]
            for module, entry, patched in values:
                live = entry.__dict__.setdefault(_LIVE, [])
                if live and live[-1].thread != me:
                    _report_overlap(self.__name__, ", ".join(block.changes), live[-1].thread)
                live.append(patched)
                module._is_dirty = True
            entered.append(values)

        def leave(block: Any, *exc: Any) -> None:
            me = threading.get_ident()
            own = [values for values in entered if values and values[0][2].thread == me]
            values = (own or entered)[-1]
            entered[:] = [each for each in entered if each is not values]
            for module, entry, patched in values:
                live = entry.__dict__[_LIVE]
                live[:] = [each for each in live if each is not patched]
                module._is_dirty = True

        cls.__enter__, cls.__exit__ = enter, leave
        return made

    patches.set_attribute(_config_module.ConfigModule, "patch", patch)

    # Two of torch's own save, assign and put back by hand; eager flex_attention goes through both.
    for generator, settings in (
        (dynamo_utils.disable_cache_limit, {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}),
        (hop_utils._set_compilation_env, {"allow_empty_graphs": True, "capture_scalar_outputs": True}),
    ):
        function = generator.__wrapped__
        original: list[Callable[..., Iterator[Any]]] = []
        inside = _inside_patch(original, settings)
        original.append(patches.swap_code(function, inside))
        for each in (function, inside):
            skip_code(each.__code__)


def _inside_patch(original: list[Callable[..., Iterator[Any]]], settings: dict[str, Any]) -> Callable[..., Iterator[Any]]:
    """A context manager's generator whose assignments end with a patch of the same values around it."""

    def suspended(*args: Any, **kwargs: Any) -> Iterator[Any]:
        from torch._dynamo import config

        with config.patch(settings):
            yield from original[0](*args, **kwargs)

    return suspended


def _report_overlap(module: str, names: str, thread: int) -> None:
    findings.report(
        Finding(
            code="config-race",
            subject=f"{module}: {names}",
            title="config.patch blocks of two threads overlap",
            now=this_thread(f"patches {names}"),
            other=other_thread(thread, "has patched the same"),
            shared=f"{module}, which belongs to the process before torch 2.12; each block puts back what it found",
            consequence="a block loses its value when the other one ends, and what is put back last stays for ever",
            fix="keep compile_guard.install(), or set the configuration once, before the threads start",
            prevented=True,
        )
    )


SEAMS = (Seam("config_patches", "a `config.patch` block has its values for itself", _config_patches, config_is_global),)
