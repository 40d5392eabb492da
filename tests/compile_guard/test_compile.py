"""`compile_guard.compile`: what it takes, what it gives, and what its wrappers do not share."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compile_guard
from compile_guard import device_cache
from compile_guard.device_cache import device_of
from tests.threads import run_in_threads

pytestmark = pytest.mark.usefixtures("guard")

CPU, META = torch.device("cpu"), torch.device("meta")


class Counting:
    """A backend that counts compiles."""

    def __init__(self) -> None:
        self.num_compiles = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_compiles += 1
        return graph.forward


@pytest.fixture
def backend() -> Counting:
    return Counting()


def entries(compiled: Any) -> dict[str, int]:
    return {str(device): info.num_entries for device, info in compiled.cache_info().items()}


x = torch.arange(6.0).reshape(2, 3)


# ------------------------------------------------------------------------------------------------------ what it takes


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice as much."""
    return x * 2


def test_function_is_compiled_once_and_keeps_its_name_and_doc(backend: Counting) -> None:
    compiled = compile_guard.compile(double, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(x), x * 2)
    assert backend.num_compiles == 1
    assert (compiled.__name__, compiled.__doc__, compiled.__wrapped__) == ("double", "Twice as much.", double)


def test_decorator_without_arguments_uses_the_default_backend() -> None:
    @compile_guard.compile
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert callable(add.cache_info)
    assert add.__name__ == "add"


def test_decorator_with_arguments(backend: Counting) -> None:
    @compile_guard.compile(backend=backend, dynamic=False, recompile_limit=3)
    def add(x: torch.Tensor, *, other: float = 1.0) -> torch.Tensor:
        return x + other

    assert torch.equal(add(x, other=2.0), x + 2)
    assert torch.equal(add(x), x + 1)
    assert add.cache_info()[CPU].recompile_limit == 3


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)


def test_bound_method(backend: Counting) -> None:
    compiled = compile_guard.compile(Scale(3).method, backend=backend)
    assert torch.equal(compiled(x), x * 3)
    assert entries(compiled) == {"cpu": 1}


def test_method_decorated_in_the_class_body_is_bound_to_each_instance(backend: Counting) -> None:
    class Local:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @compile_guard.compile(backend=backend)
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    assert torch.equal(Local(2.0).method(x), x * 2)
    assert torch.equal(Local(3.0).method(x), x * 3)


def test_staticmethod_and_classmethod_objects(backend: Counting) -> None:
    class Local:
        @compile_guard.compile(backend=backend)
        @staticmethod
        def below(x: torch.Tensor) -> torch.Tensor:
            return x * 5

        @compile_guard.compile(backend=backend)
        @classmethod
        def of_class(cls, x: torch.Tensor) -> torch.Tensor:
            return x * len(cls.__name__)

    assert torch.equal(Local.below(x), x * 5)
    assert torch.equal(Local.of_class(x), x * 5)
    assert torch.equal(Local().below(x), x * 5)


def test_bound_classmethod_and_staticmethod(backend: Counting) -> None:
    assert torch.equal(compile_guard.compile(Scale.of_class, backend=backend)(x), x * 5)
    assert torch.equal(compile_guard.compile(Scale.static, backend=backend)(x), x * 5)
    assert backend.num_compiles == 2


def test_callable_object(backend: Counting) -> None:
    compiled = compile_guard.compile(Scale(3), backend=backend)
    assert torch.equal(compiled(x), x * 3)
    assert entries(compiled) == {"cpu": 1}
    assert backend.num_compiles == 1


def test_two_callable_objects_of_one_class_each_do_their_own(backend: Counting) -> None:
    two, three = (compile_guard.compile(Scale(factor), backend=backend) for factor in (2.0, 3.0))
    assert torch.equal(two(x), x * 2)
    assert torch.equal(three(x), x * 3)
    assert entries(two) == entries(three) == {"cpu": 1}


def scaled_sum(a: torch.Tensor, b: torch.Tensor, *, scale: float) -> torch.Tensor:
    return (a + b) * scale


def test_partial_keeps_its_arguments(backend: Counting) -> None:
    compiled = compile_guard.compile(functools.partial(scaled_sum, x, scale=2.0), backend=backend)
    assert torch.equal(compiled(x), x * 4)
    assert torch.equal(compiled(x, scale=1.0), x * 2)
    assert entries(compiled) == {"cpu": 2}


def test_partial_of_a_partial_and_of_a_bound_method(backend: Counting) -> None:
    inner = functools.partial(functools.partial(scaled_sum, scale=2.0), x)
    assert torch.equal(compile_guard.compile(inner, backend=backend)(x), x * 4)
    assert torch.equal(compile_guard.compile(functools.partial(Scale(3.0).method, x), backend=backend)(), x * 3)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (torch.sin, (x,), x.sin()),
        (torch.add, (x, x), x + x),
        (operator.add, (x, x), x + x),
        (torch.Tensor.cos, (x,), x.cos()),
        (torch.nn.functional.relu, (x,), x),
        (operator.methodcaller("sin"), (x,), x.sin()),
    ],
    ids=["torch.sin", "torch.add", "operator.add", "Tensor.cos", "F.relu", "methodcaller"],
)
def test_functions_without_code_of_their_own(function: Any, args: Any, expected: torch.Tensor) -> None:
    compiled = compile_guard.compile(function, backend="eager")
    assert torch.equal(compiled(*args), expected)
    assert torch.equal(compiled(*args), expected)


def test_function_decorated_by_somebody_else(backend: Counting) -> None:
    def twice(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(function(*args))

        return wrapper

    compiled = compile_guard.compile(twice(double), backend=backend)
    assert torch.equal(compiled(x), x * 4)
    assert backend.num_compiles == 1


def test_no_grad_decorated_function(backend: Counting) -> None:
    compiled = compile_guard.compile(torch.no_grad()(double), backend=backend)
    assert not compiled(x.clone().requires_grad_()).requires_grad


def test_closure_sees_its_variable_change(backend: Counting) -> None:
    factor = 2.0

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    compiled = compile_guard.compile(scale, backend=backend)
    assert torch.equal(compiled(x), x * 2)
    factor = 3.0
    assert torch.equal(compiled(x), x * 3)


def test_what_is_compiled_already_is_compiled_anew_by_us(backend: Counting) -> None:
    other = Counting()
    compiled = compile_guard.compile(torch.compile(double, backend=other), backend=backend)
    assert torch.equal(compiled(x), x * 2)
    assert (backend.num_compiles, other.num_compiles) == (1, 0)
    again = compile_guard.compile(compiled, backend=backend)
    assert torch.equal(again(x), x * 2)
    assert backend.num_compiles == 2


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x


def generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x


async def async_generator(x: torch.Tensor) -> Any:
    yield x


class CallIsCoroutine:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "coroutine"),
        (generator, "generator"),
        (async_generator, "asynchronous generator"),
        (CallIsCoroutine(), "coroutine"),
        (functools.partial(coroutine), "coroutine"),
    ],
)
def test_functions_that_do_not_run_to_their_end_are_refused_with_the_reason(function: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"is a {kind} function: Dynamo compiles calls that run to their end"):
        compile_guard.compile(function)


@pytest.mark.parametrize("thing", [3, "text", Scale, nn.Linear], ids=["int", "str", "class", "module class"])
def test_what_cannot_be_called_or_is_a_class_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="takes a function, a method, a module or a callable object, got"):
        compile_guard.compile(thing)


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        compile_guard.compile(double, recompile_limit=0)


@pytest.mark.parametrize("limit", ["a", 1.5, True])
def test_limit_that_is_no_integer_is_refused_with_its_value(limit: Any) -> None:
    with pytest.raises(TypeError, match=rf"recompile_limit=\) must be an integer or None, got {limit!r}"):
        compile_guard.compile(double, recompile_limit=limit)


def test_key_that_cannot_be_hashed_is_refused_with_its_value() -> None:
    with pytest.raises(TypeError, match=r"shared=\) is a key .* \[1\] is not hashable"):
        compile_guard.compile(double, shared=[1])  # type: ignore[arg-type]


def test_unknown_backend_is_refused_as_by_torch() -> None:
    with pytest.raises(Exception, match="nonesuch"):
        compile_guard.compile(double, backend="nonesuch")(x)


def test_keyword_only_tensors(backend: Counting) -> None:
    compiled = compile_guard.compile(lambda *, a, b: a - b, backend=backend)
    assert torch.equal(compiled(b=x, a=x * 3), x * 2)
    assert entries(compiled) == {"cpu": 1}


def test_default_arguments_and_varargs(backend: Counting) -> None:
    def sum_of(first: torch.Tensor, *rest: torch.Tensor, scale: float = 2.0, **named: torch.Tensor) -> torch.Tensor:
        return (first + sum(rest) + sum(named.values())) * scale

    compiled = compile_guard.compile(sum_of, backend=backend)
    assert torch.equal(compiled(x), x * 2)
    assert torch.equal(compiled(x, x, other=x, scale=1.0), x * 3)


def test_function_without_tensors(backend: Counting) -> None:
    compiled = compile_guard.compile(lambda n: torch.ones(n) * 2, backend=backend)
    assert compiled(3).tolist() == [2, 2, 2]


@pytest.mark.parametrize("backend_name", ["eager", "aot_eager"])
def test_gradients_are_those_of_the_eager_function(backend_name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    compiled = compile_guard.compile(loss, backend=backend_name)
    ours, eager = (x.clone().requires_grad_() for _ in range(2))
    compiled(ours).backward()
    loss(eager).backward()
    torch.testing.assert_close(ours.grad, eager.grad)


def test_fullgraph_refuses_a_graph_break_and_takes_what_has_none(backend: Counting) -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    assert torch.equal(compile_guard.compile(double, backend=backend, fullgraph=True)(x), x * 2)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_guard.compile(breaks, backend=backend, fullgraph=True)(x)
    assert torch.equal(compile_guard.compile(breaks, backend=backend)(x), x + 1)


def test_inlined_into_an_outer_compiled_function(backend: Counting) -> None:
    inner = compile_guard.compile(double, backend=Counting())

    @torch.compile(backend=backend, fullgraph=True)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    assert torch.equal(outer(x), x * 2 + 1)
    assert backend.num_compiles == 1
    assert entries(inner) == {}


def test_module_inlined_into_an_outer_compiled_function(backend: Counting) -> None:
    linear = nn.Linear(3, 3)
    inner = compile_guard.compile(linear, backend=Counting())

    @torch.compile(backend=backend, fullgraph=True)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    torch.testing.assert_close(outer(x), linear(x) + 1)
    assert backend.num_compiles == 1


def test_called_from_a_function_that_dynamo_runs_around_a_graph_break(backend: Counting) -> None:
    inner = compile_guard.compile(double, backend=backend)

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return inner(x)

    for _ in range(2):
        assert torch.equal(outer(x), (x + 1) * 2)


def test_disabled_helper_inside(backend: Counting) -> None:
    seen = []

    @torch._dynamo.disable
    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x

    compiled = compile_guard.compile(lambda x: note(x * 2) + 1, backend=backend)
    assert torch.equal(compiled(x), x * 2 + 1)
    assert torch.equal(compiled(x), x * 2 + 1)
    assert seen == [(2, 3)] * 2
    assert backend.num_compiles == 2


def test_exception_of_the_function_comes_out_as_it_is(backend: Counting) -> None:
    @torch._dynamo.disable
    def fail() -> None:
        raise LookupError("of the function")

    def raises(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        fail()
        return x

    compiled = compile_guard.compile(raises, backend=backend)
    for _ in range(2):
        with pytest.raises(LookupError, match="of the function"):
            compiled(x)


# ---------------------------------------------------------------------------------------------------- modules


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale + self.offset


class Broken(Own):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y * scale


@pytest.mark.parametrize("make", [Own, Broken, lambda: nn.Linear(3, 3), lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU())])
def test_module_computes_what_it_does_eager(make: Callable[[], nn.Module], backend: Counting) -> None:
    module = make()
    compiled = compile_guard.compile(module, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
    assert backend.num_compiles == (2 if isinstance(module, Broken) else 1)
    assert sum(entries(compiled).values()) == 1


def test_module_keyword_arguments(backend: Counting) -> None:
    module = Own()
    torch.testing.assert_close(compile_guard.compile(module, backend=backend)(x=x, scale=2.0), module(x, 2.0))


def test_module_is_what_torch_compile_gives() -> None:
    module = Own()
    ours, theirs = compile_guard.compile(module, backend="eager"), torch.compile(module, backend="eager")
    assert isinstance(ours, torch._dynamo.OptimizedModule)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert ours._orig_mod is module
    assert ours.linear is module.linear
    assert ours.training is module.training
    ours.eval()
    assert not module.training
    ours.offset = torch.zeros(3)
    assert torch.equal(module.offset, torch.zeros(3))


def test_module_state_dict_goes_there_and_back() -> None:
    ours, other = compile_guard.compile(Own(), backend="eager"), compile_guard.compile(Own(), backend="eager")
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x), ours(x))


@pytest.mark.parametrize("when", ["cold", "warm"])
@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "torch.save"])
def test_module_is_copied_and_pickled_without_its_compiled_code(how: str, when: str) -> None:
    compiled = compile_guard.compile(Own(), backend="eager")
    if when == "warm":
        compiled(x)
    if how == "torch.save":
        buffer = io.BytesIO()
        torch.save(compiled, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        make: Any = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
        other = make[how](compiled)
    assert type(other) is type(compiled)
    torch.testing.assert_close(other(x), compiled(x))
    if how != "copy":
        with torch.no_grad():
            other.linear.weight.add_(1)
        assert not torch.equal(other(x), compiled(x))
        assert sum(entries(other).values()) == 1


def test_hooks_run_on_each_call(backend: Counting) -> None:
    seen: list[str] = []
    module = Own()
    compiled = compile_guard.compile(module, backend=backend)
    compiled(x)
    before = module.register_forward_pre_hook(lambda *_: seen.append("before"))
    after = module.register_forward_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        compiled(x)
    assert seen == ["before", "after"] * 2
    before.remove()
    after.remove()
    compiled(x)
    assert len(seen) == 4


def test_hooks_on_the_compiled_module_itself_run() -> None:
    seen: list[str] = []
    compiled = compile_guard.compile(Own(), backend="eager")
    compiled.register_forward_hook(lambda *_: seen.append("after"))
    compiled(x)
    compiled(x)
    assert seen == ["after"] * 2


def test_hook_that_changes_the_output_counts() -> None:
    module = Own()
    module.register_forward_hook(lambda _, __, output: output + 100)
    torch.testing.assert_close(compile_guard.compile(module, backend="eager")(x), module(x))


def test_lazy_module_is_initialised_by_its_first_call(backend: Counting) -> None:
    lazy = nn.LazyLinear(4)
    compiled = compile_guard.compile(lazy, backend=backend)
    assert compiled(x).shape == (2, 4)
    assert type(lazy) is nn.Linear
    torch.testing.assert_close(compiled(x), lazy(x))
    assert sum(entries(compiled).values()) == 1


def test_forward_put_on_the_instance_is_the_one_that_runs() -> None:
    module = Own()
    module.forward = lambda x: x * 7  # type: ignore[method-assign]
    compiled = compile_guard.compile(module, backend="eager")
    assert torch.equal(compiled(x), x * 7)


def test_forward_replaced_after_compile_is_the_one_that_runs() -> None:
    module = Own()
    compiled = compile_guard.compile(module, backend="eager")
    compiled(x)
    module.forward = lambda x: x * 7  # type: ignore[method-assign]
    assert torch.equal(compiled(x), x * 7)


def test_module_compiled_in_place_by_torch_works_under_the_guard() -> None:
    module = Own()
    expected = module(x)
    module.compile(backend="eager")
    torch.testing.assert_close(module(x), expected)


def test_compiled_module_compiled_again_is_not_wrapped_twice() -> None:
    module = Own()
    again = compile_guard.compile(compile_guard.compile(module, backend="eager"), backend="eager")
    assert again._orig_mod is module


def test_train_and_eval_are_two_versions(backend: Counting) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    compiled = compile_guard.compile(module, backend=backend)
    compiled(x)
    compiled.eval()
    torch.testing.assert_close(compiled(x), module(x))
    compiled.train()
    compiled(x)
    assert backend.num_compiles == 2


def test_gradients_reach_the_parameters() -> None:
    module = Own()
    compile_guard.compile(module, backend="aot_eager")(x).sum().backward()
    ours = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    module(x).sum().backward()
    for one, other in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


# ---------------------------------------------------------------------------------------------- what is not shared


def test_two_wrappers_of_one_function_share_no_entries(backend: Counting) -> None:
    wrappers = [compile_guard.compile(double, backend=backend) for _ in range(3)]
    for compiled in wrappers:
        compiled(x)
    assert backend.num_compiles == 3
    assert [entries(compiled) for compiled in wrappers] == [{"cpu": 1}] * 3
    names = {compiled.cache_info()[CPU].name for compiled in wrappers}
    assert len(names) == 3
    assert torch._C._dynamo.eval_frame._debug_get_cache_entry_list(double.__code__) == []


def test_plain_wrappers_do_share_entries() -> None:
    """The mirror: without clones it is as the hazard says."""
    for _ in range(3):
        torch.compile(double, backend="eager", dynamic=False)(x)
    assert len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(double.__code__)) >= 1


def test_shared_key_shares_the_clone(backend: Counting) -> None:
    wrappers = [compile_guard.compile(double, backend=backend, shared="layers") for _ in range(3)]
    for compiled in wrappers:
        assert torch.equal(compiled(x), x * 2)
    assert backend.num_compiles == 1
    assert [entries(compiled) for compiled in wrappers] == [{"cpu": 1}] * 3


def test_shared_key_of_another_function_is_another_clone(backend: Counting) -> None:
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    one = compile_guard.compile(double, backend=backend, shared="both")
    other = compile_guard.compile(triple, backend=backend, shared="both")
    assert torch.equal(one(x), x * 2)
    assert torch.equal(other(x), x * 3)


def test_shared_key_of_closures_that_differ_keeps_each_ones_variables(backend: Counting) -> None:
    def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return scale

    two, three = (compile_guard.compile(scaled(factor), backend=backend, shared="scale") for factor in (2.0, 3.0))
    assert torch.equal(two(x), x * 2)
    assert torch.equal(three(x), x * 3)


def test_shared_key_of_a_closure_is_forgotten_with_the_closure(backend: Counting) -> None:
    def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * factor

    gc.collect()
    before = len(device_cache._shared)
    function = scaled(2.0)
    for _ in range(2):  # the wrapper dies, the function lives: nothing is compiled anew
        compile_guard.compile(function, backend=backend, shared="scaled")(x)
    assert backend.num_compiles == 1
    assert len(device_cache._shared) == before + 1
    del function
    gc.collect()
    assert len(device_cache._shared) == before


def test_shared_key_of_functions_that_differ_in_defaults_keeps_each_ones(backend: Counting) -> None:
    def made(default: float) -> Callable[..., torch.Tensor]:
        def scale(x: torch.Tensor, factor: float = default) -> torch.Tensor:
            return x * factor

        return scale

    two, three = (compile_guard.compile(made(factor), backend=backend, shared="defaults") for factor in (2.0, 3.0))
    assert torch.equal(two(x), x * 2)
    assert torch.equal(three(x), x * 3)


def test_shared_modules_use_one_clone_for_all_layers(backend: Counting) -> None:
    layers = [Own() for _ in range(4)]
    compiled = [compile_guard.compile(layer, backend=backend, shared="layers") for layer in layers]
    for ours, layer in zip(compiled, layers, strict=True):
        torch.testing.assert_close(ours(x), layer(x))
    assert backend.num_compiles == 1


def test_shared_key_with_other_options_is_refused_and_says_both(backend: Counting) -> None:
    compile_guard.compile(double, backend=backend, shared="options")
    with pytest.raises(ValueError, match=r"shared='options'.*was first called with .*now with .*Use another key"):
        compile_guard.compile(double, backend="eager", shared="options")


def test_each_device_has_entries_of_its_own(backend: Counting) -> None:
    compiled = compile_guard.compile(double, backend=backend)
    compiled(x)
    assert compiled(x.to(META)).device == META
    assert entries(compiled) == {"cpu": 1, "meta": 1}
    names = {info.name for info in compiled.cache_info().values()}
    assert any("meta" in name for name in names)
    assert len(names) == 2


def test_module_moved_to_another_device_has_entries_there() -> None:
    module = Own()
    compiled = compile_guard.compile(module, backend="eager")
    compiled(x)
    compiled.to(META)
    assert compiled(x.to(META)).device == META
    assert entries(compiled) == {"cpu": 1, "meta": 1}


def test_limit_holds_for_each_clone_and_not_for_all(guard: Any) -> None:
    one, other = (compile_guard.compile(double, backend="eager", dynamic=False, recompile_limit=2) for _ in range(2))
    for size in range(2, 6):
        one(torch.ones(size))
    assert entries(one) == {"cpu": 2}
    assert entries(other) == {}
    limits = [found for found in guard.findings() if found.code == "recompile-limit"]
    assert [found.prevented for found in limits] == [False]
    name = one.cache_info()[CPU].name
    assert limits[0].subject == name
    assert "calls this wrapper on cpu" in limits[0].title
    assert "2 entries, recompile_limit 2" in limits[0].shared
    assert "instead of torch.compile" not in limits[0].fix  # it is in use already
    assert "recompile_limit=" in limits[0].fix
    other(torch.ones(2))
    other(torch.ones(3))
    assert entries(other) == {"cpu": 2}
    one(torch.ones(2, device=META))
    assert entries(one) == {"cpu": 2, "meta": 1}


def test_larger_limit_than_torchs_own_holds(guard: Any) -> None:
    compiled = compile_guard.compile(double, backend="eager", dynamic=False, recompile_limit=12)
    for size in range(2, 14):
        compiled(torch.ones(size))
    assert entries(compiled) == {"cpu": 12}
    assert guard.findings() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_module_is_refused_with_the_reason(guard: Any) -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"TorchScript module \(Linear\).*Compile the module that it was scripted from"):
        compile_guard.compile(scripted)


def test_plain_function_that_runs_into_torchs_limit_is_a_finding(guard: Any) -> None:
    compiled = torch.compile(double, backend="eager", dynamic=False)
    for size in range(2, 12):
        compiled(torch.ones(size))
    found, each_call = guard.findings()
    assert (found.code, found.subject) == ("recompile-limit", "double")
    assert (each_call.code, each_call.subject, each_call.count) == ("eager-call", "double", 2)
    assert "flex_attention" not in found.consequence + each_call.consequence
    assert "on every device" in found.title
    assert "compile_guard.compile() instead of torch.compile()" in found.fix


def test_history_of_dynamic_shapes_is_not_shared_between_clones() -> None:
    shapes: dict[str, list[Any]] = {"one": [], "other": []}

    def noting(name: str) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            shapes[name].append(
                any(
                    isinstance(size, torch.SymInt) or not isinstance(each, torch.Tensor)
                    for each in inputs
                    for size in (each.shape if isinstance(each, torch.Tensor) else ())
                )
                or any(not isinstance(each, torch.Tensor) for each in inputs)
            )
            return graph.forward

        return backend

    one = compile_guard.compile(double, backend=noting("one"))
    other = compile_guard.compile(double, backend=noting("other"))
    one(torch.ones(4, 3))
    one(torch.ones(5, 3))
    other(torch.ones(6, 3))
    assert shapes == {"one": [False, True], "other": [False]}


def test_devices_of_one_wrapper_share_no_history_of_dynamic_shapes(backend: Counting) -> None:
    compiled = compile_guard.compile(double, backend=backend)
    compiled(torch.ones(4, 3))
    compiled(torch.ones(5, 3, device=META))
    compiled(torch.ones(5, 3, device=META))
    assert entries(compiled) == {"cpu": 1, "meta": 1}


# ---------------------------------------------------------------------------------------------- device of a call


on_meta = torch.empty(2, device=META)
on_cpu = torch.empty(2)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((on_meta, on_cpu), {}, META),
        ((on_cpu, on_meta), {}, CPU),
        ((1, [on_meta], on_cpu), {}, META),
        (({"a": [on_meta]}, on_cpu), {}, META),
        (((1, (2, on_cpu)), on_meta), {}, CPU),
        ((1, None), {"a": on_meta}, META),
        ((), {"a": 1, "b": [on_cpu], "c": on_meta}, CPU),
        ((nn.Linear(1, 1, device=META), on_cpu), {}, CPU),
        ((nn.Linear(1, 1, device=META), 1), {}, META),
        ((nn.ReLU(), nn.Linear(1, 1, device=META)), {}, META),
        ((nn.BatchNorm1d(2, affine=False, device=META),), {}, META),
        ((nn.ReLU(), 3), {}, None),
        ((), {}, None),
    ],
)
def test_device_is_that_of_the_first_tensor_else_of_a_module_else_the_current(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: torch.device | None
) -> None:
    if expected is None:
        if torch.cuda.is_initialized():
            pytest.skip("a CUDA context is open: the current device is a GPU")
        expected = CPU
    assert device_of(args, kwargs) == expected


def test_containers_that_contain_themselves_do_not_hang() -> None:
    loop: list[Any] = []
    loop.append(loop)
    loop.append(on_meta)
    assert run_in_threads(lambda: device_of((loop,), {}), timeout=10) == [META]


def test_other_containers_with_tensors_are_searched(backend: Counting) -> None:
    import collections
    import dataclasses

    @dataclasses.dataclass
    class Batch:
        hidden: torch.Tensor

    pair = collections.namedtuple("pair", "a b")
    assert device_of((pair(1, on_meta),), {}) == META
    assert device_of((collections.OrderedDict(a=on_meta),), {}) == META
    compiled = compile_guard.compile(lambda batch: batch.hidden * 2, backend=backend)
    compiled(Batch(x))
    compiled(Batch(x.to(META)))
    assert sum(entries(compiled).values()) == 2


# ---------------------------------------------------------------------------------------------- cache_info, reset


def test_cache_info_is_empty_before_the_first_call_and_tells_limit_and_name(backend: Counting) -> None:
    compiled = compile_guard.compile(double, backend=backend)
    assert compiled.cache_info() == {}
    compiled(x)
    info = compiled.cache_info()[CPU]
    assert info.num_entries == 1
    assert info.recompile_limit == torch._dynamo.config.recompile_limit
    assert "double" in info.name


def test_reset_of_a_device_drops_that_devices_code_alone(backend: Counting) -> None:
    compiled = compile_guard.compile(double, backend=backend)
    compiled(x)
    compiled(x.to(META))
    compile_guard.reset("meta")
    assert entries(compiled) == {"cpu": 1}
    compiled(x)
    assert backend.num_compiles == 2
    compiled(x.to(META))
    assert backend.num_compiles == 3


def test_reset_drops_everything(backend: Counting) -> None:
    compiled, plain = compile_guard.compile(double, backend=backend), torch.compile(double, backend=backend)
    compiled(x)
    plain(x)
    compile_guard.reset()
    assert compiled.cache_info() == {}
    assert torch.equal(compiled(x), x * 2)
    assert torch.equal(plain(x), x * 2)
    assert backend.num_compiles == 4


def test_torchs_own_reset_reaches_clones_too(backend: Counting) -> None:
    compiled = compile_guard.compile(double, backend=backend)
    compiled(x)
    torch._dynamo.reset()
    assert torch.equal(compiled(x), x * 2)
    assert backend.num_compiles == 2


def test_reset_frees_a_device_that_had_run_into_its_limit() -> None:
    compiled = compile_guard.compile(double, backend="eager", dynamic=False, recompile_limit=1)
    compiled(torch.ones(2))
    compiled(torch.ones(3))
    compile_guard.reset("cpu")
    compiled(torch.ones(3))
    assert entries(compiled) == {"cpu": 1}


def test_wrappers_that_are_dropped_free_their_clones(guard: Any) -> None:
    import gc
    import weakref

    compiled = compile_guard.compile(lambda x: x * math.pi, backend="eager")
    compiled(x)
    cache = weakref.ref(compiled._compile_guard_cache)
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert cache() is None


def test_threads_that_compile_wrappers_of_one_function_share_nothing(backend: Counting) -> None:
    def work() -> dict[str, int]:
        compiled = compile_guard.compile(double, backend=backend)
        assert torch.equal(compiled(x), x * 2)
        return entries(compiled)

    assert run_in_threads(*[work] * 4) == [{"cpu": 1}] * 4
    assert backend.num_compiles == 4


def test_callable_object_with_a_static_call_gets_no_instance(guard: Any) -> None:
    class Doubler:
        @staticmethod
        def __call__(y: torch.Tensor) -> torch.Tensor:
            return y * 2

    assert torch.equal(compile_guard.compile(Doubler(), backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
