"""`compile_guard.compile`: `torch.compile` with a cache of its own for each wrapper and device.

torch keeps compiled versions on the function's code object: every wrapper, thread and device shares them, and one limit for
all (8), beyond which the function runs eager for the rest of the process. Here each wrapper and device has a clone of the
function, with a code object of its own, so that neither entries nor limits nor the history of dynamic shapes are shared.
Helpers that a graph break calls are not cloned and stay shared.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

from compile_guard import fork, torch_seams
from compile_guard.entry import gated_dispatch
from compile_guard.findings import findings, mode_from_environment
from compile_guard.install import install
from compile_guard.single_flight import device_of_clone

if TYPE_CHECKING:
    import torch

_C = TypeVar("_C", bound=Callable[..., Any])
_clone_numbers = itertools.count()
_caches: weakref.WeakSet[DeviceCache] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[Hashable, DeviceCache] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()
_SHARED_CACHES = "_compile_guard_shared"
"""Attribute of a function that keeps its `shared=` caches alive."""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The cache of one device."""

    num_entries: int
    """Compiled versions of the function for this device."""
    recompile_limit: int
    """How many there may be before the function runs eager on this device."""
    name: str
    """Name of the clone in tracebacks, profiles and torch's logs."""


@dataclass(frozen=True)
class CompileOptions:
    """What a wrapper was made with: pickled and copied with a compiled module, without its caches."""

    torch_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`."""
    recompile_limit: int | None = None
    shared: Hashable | None = None


class DeviceCache:
    """The clones of one function, by device. `function` takes whatever the wrapper is called with."""

    def __init__(self, function: types.FunctionType, options: CompileOptions) -> None:
        self.function = function
        self.options = options
        self._compiled: dict[torch.device, Callable[..., Any]] = {}
        self._codes: dict[torch.device, types.CodeType] = {}
        self._bindings: weakref.WeakSet[_Bound] = weakref.WeakSet()
        self._lock = threading.Lock()
        _caches.add(self)

    def bound(self, arguments: tuple[Any, ...]) -> _Bound:
        """The compiled clones with `arguments` in front of those of a call, by device, each made where it is missing."""
        binding = _Bound(self, arguments)
        with self._lock:
            self._bindings.add(binding)
        return binding

    def bind(self, binding: _Bound, device: torch.device) -> Callable[..., Any]:
        """The compiled clone for a device, made at its first call, entered into `binding`. Nothing is compiled here."""
        import torch

        with self._lock:
            compiled = self._compiled.get(device)
            if compiled is None:
                clone = clone_function(self.function, f"{device.type}{'' if device.index is None else device.index}")
                device_of_clone[clone.__code__] = str(device)
                if self.options.recompile_limit is not None:
                    torch_seams.recompile_limits[clone.__code__] = self.options.recompile_limit
                compiled = torch.compile(clone, **self.options.torch_options)
                # The dispatcher is an entry itself; torch's own wrapper is enough behind it.
                compiled = getattr(compiled, "_compile_guard_inner", compiled)
                self._codes[device] = clone.__code__
                self._compiled[device] = compiled
            arguments = binding.arguments
            binding.keep(device, functools.partial(compiled, *arguments) if arguments else compiled)
            return binding[device]

    def info(self) -> dict[torch.device, CacheInfo]:
        """The state of each device's cache."""
        limit = self.options.recompile_limit
        limit = torch_seams.recompile_limit() if limit is None else limit
        return {device: CacheInfo(torch_seams.entries(code), limit, code.co_name) for device, code in list(self._codes.items())}

    def retire(self, device: torch.device | None) -> None:
        """Forget a device's clone, or every one. A call that is inside one keeps it alive until it ends."""
        with self._lock:
            for each in list(self._compiled) if device is None else [device]:
                self._compiled.pop(each, None)
                self._codes.pop(each, None)
                for binding in list(self._bindings):
                    binding.forget(each)


class _Bound(dict["torch.device", Callable[..., Any]]):
    """What one wrapper calls, by device: a plain dict on the warm path, and an attribute for the CPU."""

    __slots__ = ("__weakref__", "_cache", "arguments", "cpu")  # the fastest attribute there is
    __hash__ = object.__hash__  # type: ignore[assignment]  # held weakly, by identity

    def __init__(self, cache: DeviceCache, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._cache = cache
        self.arguments = arguments
        self.cpu: Callable[..., Any] | None = None

    def __missing__(self, device: torch.device) -> Callable[..., Any]:
        return self._cache.bind(self, device)

    def keep(self, device: torch.device, compiled: Callable[..., Any]) -> None:
        """What is called from now on for a device."""
        self[device] = compiled
        if device.type == "cpu":
            self.cpu = compiled

    def forget(self, device: torch.device) -> None:
        """Ask the cache again at the device's next call."""
        self.pop(device, None)
        if device.type == "cpu":
            self.cpu = None


def clone_function(function: types.FunctionType, suffix: str) -> types.FunctionType:
    """A copy of `function` with a code object of its own, and a name of its own in it.

    The name matters: torch keeps the history of dynamic shapes by file, line and name. File and line stay the
    original's, so that tracebacks and debuggers show its source.
    """
    code = function.__code__
    own_name = f"{code.co_name}_{suffix}_{next(_clone_numbers)}"
    clone = types.FunctionType(
        code.replace(co_name=own_name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    # The clone must not keep the caches that hold it: torch has references to it for as long as its code is cached.
    clone.__dict__.update((name, value) for name, value in vars(function).items() if name != _SHARED_CACHES)
    clone.__qualname__ = function.__qualname__
    clone.__module__ = function.__module__
    clone.__doc__ = function.__doc__
    clone.__annotations__ = function.__annotations__
    return clone


def cache_of(function: types.FunctionType, options: CompileOptions) -> DeviceCache:
    """The cache of a new wrapper: a new one, or with `shared=` that of all wrappers of the function with the same key."""
    if options.shared is None:
        return DeviceCache(function, options)
    # Functions made by one `def` differ in what they close over and in their defaults: those must not meet in one clone.
    own = (*(function.__closure__ or ()), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    key = (options.shared, function.__code__, id(function.__globals__), tuple(map(id, own)))
    with _shared_lock:
        cache = _shared.setdefault(key, DeviceCache(function, options))
    # As long as the function, or a wrapper of it: what a closure was compiled to goes with the closure.
    vars(function).setdefault(_SHARED_CACHES, {})[key] = cache
    if cache.options != options:
        raise ValueError(
            f"compile(shared={options.shared!r}) of {function.__qualname__} was first called with "
            f"{cache.options}, now with {options}: wrappers that share compiled code must be "
            "compiled alike. Use another key, or the same options."
        )
    return cache


def device_of(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor among the arguments, nested containers searched in order; else of the first module's
    first parameter; else the current device."""
    import torch

    modules: list[torch.nn.Module] = []
    pending: list[Any] = [*kwargs.values()][::-1] + list(args)[::-1]
    searched: set[int] = set()  # a list may contain itself
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, torch.nn.Module):
            modules.append(value)
        elif isinstance(value, (dict, list, tuple)) and id(value) not in searched:
            searched.add(id(value))
            pending.extend(list(value.values() if isinstance(value, dict) else value)[::-1])
    for module in modules:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            return tensor.device
    return current_device()


def current_device() -> torch.device:
    """The calling thread's current accelerator once one is in use, else the CPU."""
    import torch

    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def dispatcher(cache: DeviceCache, like: Callable[..., Any], bound: tuple[Any, ...] = ()) -> Callable[..., Any]:
    """The function that calls the clone of its arguments' device, with `bound` in front of them."""
    import torch

    def device_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        return device_of(args + bound, kwargs)

    dispatch = gated_dispatch(cache.bound(bound), device_of_call, torch.Tensor)
    # A graph break may call us with Dynamo watching; and when it inlines us it shall see the function, not the dispatch.
    for function in (device_of_call, device_of, DeviceCache.bind, _Bound.__missing__, _Bound.keep):
        torch_seams.skip_code(function.__code__)
    functools.update_wrapper(dispatch, like)
    dispatch._torchdynamo_inline = like  # type: ignore[attr-defined]
    dispatch.cache_info = cache.info  # type: ignore[attr-defined]
    dispatch._compile_guard_cache = cache  # type: ignore[attr-defined]
    torch_seams.allow_inlining(dispatch)
    return dispatch


@overload
def compile(
    model: None = None, *, shared: Hashable | None = ..., recompile_limit: int | None = ..., **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
@overload
def compile(model: _C, *, shared: Hashable | None = ..., recompile_limit: int | None = ..., **options: Any) -> _C: ...
def compile(model: Any = None, *, shared: Hashable | None = None, recompile_limit: int | None = None, **options: Any) -> Any:
    """`torch.compile` for threads: a drop-in for functions, methods, modules and callable objects, and a decorator.

    Installs the guard. Each wrapper has a cache for each device; the device of a call is that of its first tensor argument
    (nested containers searched in order), else of the module's first parameter, else the current one. `cache_info()` of
    what is returned tells the state of each.

    Args:
        model: what to compile; None when used as a decorator with arguments.
        shared: wrappers of one function with the same key share one cache for each device: for the layers of a model.
        recompile_limit: compiled versions for each device before it runs eager; torch's own limit when None.
        options: those of `torch.compile`.

    Raises:
        TypeError: `model` cannot be compiled (the message says why), `recompile_limit` is no integer or `shared` no key.
        ValueError: `recompile_limit` is below 1, or wrappers with one `shared` key differ in their options.
    """
    if recompile_limit is not None and type(recompile_limit) is not int:
        raise TypeError(f"compile(recompile_limit=) must be an integer or None, got {recompile_limit!r}")
    if recompile_limit is not None and recompile_limit < 1:
        raise ValueError(f"compile(recompile_limit=) must be at least 1, got {recompile_limit}")
    if not isinstance(shared, Hashable):
        raise TypeError(f"compile(shared=) is a key that wrappers have in common, such as a string; {shared!r} is not hashable")
    if model is None:
        return lambda decorated: compile(decorated, shared=shared, recompile_limit=recompile_limit, **options)
    import torch

    if mode_from_environment(findings.mode) == "off":
        return torch.compile(model, **options)
    install()
    wanted = CompileOptions(options, recompile_limit, shared)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"compile() got a TorchScript module ({getattr(model, 'original_name', type(model).__name__)}): its forward is no "
            "Python, so that Dynamo finds nothing to compile, and every call would run as scripted. Compile the module that it "
            "was scripted from, or call it as it is."
        )
    if isinstance(model, torch.nn.Module):
        from compile_guard.compiled_module import CompiledModule

        return CompiledModule(getattr(model, "_orig_mod", model), wanted)
    return _compile_callable(model, wanted)


def _compile_callable(model: Any, options: CompileOptions) -> Any:
    if isinstance(model, (staticmethod, classmethod)):
        return type(model)(_compile_callable(model.__func__, options))
    if isinstance(model, type) or not callable(model):
        what = f"class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} {model!r:.80}"
        raise TypeError(f"compile() takes a function, a method, a module or a callable object, got {what}")
    if isinstance(model, functools.partial):
        inner = _compile_callable(model.func, options)
        bound_call: Any = functools.partial(inner, *model.args, **model.keywords)
        bound_call.cache_info = inner.cache_info
        return bound_call
    model = getattr(model, "_torchdynamo_orig_callable", model)  # compiled already: its own options end here
    function: Any
    bound: tuple[Any, ...]
    if isinstance(model, types.MethodType):
        function, bound = model.__func__, (model.__self__,)
    elif isinstance(model, types.FunctionType):
        function, bound = model, ()
    else:
        call = inspect.getattr_static(type(model), "__call__")  # a staticmethod takes no instance
        if isinstance(call, types.FunctionType):
            function, bound = call, (model,)
        else:
            function, bound = calling(model), ()
    for test, kind in (
        (inspect.iscoroutinefunction, "coroutine"),
        (inspect.isasyncgenfunction, "asynchronous generator"),
        (inspect.isgeneratorfunction, "generator"),
    ):
        if test(function):
            raise TypeError(
                f"{function.__qualname__} is a {kind} function: Dynamo compiles calls that run to their end, and would run it "
                "eager without a word. Compile the tensor work that it does as a function of its own."
            )
    if not isinstance(function, types.FunctionType):
        function = calling(function)
    like = model if isinstance(model, (types.FunctionType, types.MethodType)) else function
    made: Any = dispatcher(cache_of(function, options), like, bound)
    made._torchdynamo_orig_callable = model
    return made


def calling(target: Callable[..., Any]) -> types.FunctionType:
    """A Python function that calls `target`, for callables without code of their own (built-in functions, C types)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    name = getattr(target, "__name__", type(target).__name__)
    call.__name__, call.__qualname__ = name, name
    made: Any = call
    return made  # type: ignore[no-any-return]


def reset(device: torch.device | str | int | None = None) -> None:
    """Drop compiled code: of one device (that made by `compile_guard.compile`), or with None everything torch has.

    Waits, in the second case, until no compiled call is running; see `torch.compiler.reset`.

    Raises:
        GuardError: called from inside a compiled call, or calls did not end in time.
    """
    import torch

    if device is None:
        torch.compiler.reset()
    for cache in list(_caches):
        cache.retire(None if device is None else torch.device(device))


def _after_fork_in_child() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for cache in list(_caches):
        cache._lock = threading.Lock()


fork.in_child.append(_after_fork_in_child)
