"""Reversible replacements of other people's functions, and nothing else."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()
_swap_numbers = itertools.count()
_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class Patches:
    """Replacements that `undo()` takes back in reverse order, each object exactly as it was."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], bool]]] = []

    def set_attribute(self, owner: Any, name: str, value: Any) -> Any:
        """Replace `owner.name`; returns what stood there.

        The attribute is read without the descriptor protocol, so that a staticmethod is put back as one.
        """
        own = vars(owner)
        prior = own.get(name, _MISSING)
        resolved = getattr(owner, name, None)
        setattr(owner, name, value)

        def undo() -> bool:
            if vars(owner).get(name, _MISSING) is not value:
                return False  # somebody else patched over us; putting our predecessor back would drop theirs
            if prior is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, prior)
            return True

        self._undo.append((f"{getattr(owner, '__name__', owner)}.{name}", undo))
        return resolved

    def swap_code(self, function: Any, replacement: Callable[..., Any], *, when: str | None = None) -> types.FunctionType:
        """Make every holder of `function` run `replacement`; returns a function that does what `function` did.

        An assignment to a module's attribute misses callers that took the function object earlier (`compile_wrapper`
        keeps `is_fx_symbolic_tracing` from the moment it was made). File, line and name stay: `inspect.getsource` and
        TorchScript read a function's source through its code object.

        Args:
            when: a global of the function's module; while it is false, the function returns it and calls nothing, so that
                what stands on a hot path costs no second frame.

        Raises:
            ValueError: the function closes over variables; its code cannot be exchanged.
        """
        original_code = function.__code__
        if original_code.co_freevars:
            raise ValueError(f"{function.__qualname__} closes over {original_code.co_freevars}; its code cannot be swapped")
        original = types.FunctionType(
            original_code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        parameters = "*args, **kwargs" if function.__code__.co_argcount or original_code.co_flags & _VARIADIC else ""
        key = f"__compile_guard_{function.__name__}_{next(_swap_numbers)}"
        call = f"{key}({parameters})"
        source = f"def {function.__name__}({parameters}):\n    return {call if when is None else f'{when} and {call}'}\n"
        module_code = compile(source, original_code.co_filename, "exec", dont_inherit=True)
        code = next(const for const in module_code.co_consts if isinstance(const, types.CodeType))
        code = code.replace(co_firstlineno=original_code.co_firstlineno)
        function.__globals__[key] = replacement
        # Dynamo reads `checkpoint`'s signature to tell its arguments from those of the block.
        had_signature = "__signature__" in vars(function)
        if not had_signature:
            function.__signature__ = inspect.signature(function, follow_wrapped=False)
        function.__code__ = code

        def undo() -> bool:
            if function.__code__ is not code:
                return False
            function.__code__ = original_code
            if not had_signature:
                del function.__signature__
            del function.__globals__[key]
            return True

        self._undo.append((f"{function.__module__}.{function.__qualname__}", undo))
        return original

    def on_undo(self, name: str, undo: Callable[[], None]) -> None:
        """Run `undo` in its turn."""

        def done() -> bool:
            undo()
            return True

        self._undo.append((name, done))

    def undo(self) -> list[str]:
        """Take every replacement back; returns the names of those that somebody else has replaced since."""
        left = [name for name, undo in reversed(self._undo) if not undo()]
        self._undo.clear()
        return left
