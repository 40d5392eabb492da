"""The fused head loss against the plain one, forward and backward: on CUDA, or on the CPU in Triton's interpreter."""

import dataclasses
import threading

import pytest
import torch
from interpreter import DEVICE, hold_in_the_interpreter, kernel_runs
from torch import Tensor

import compile_guard
from dflash_train.config import ConfigError, LossConfig
from dflash_train.losses import LossSums, block_loss
from dflash_train.vocabulary import Vocabulary

H, V, M, P = 16, 41, 7, 5
TERMS = {
    "ce": LossConfig(),
    "kl": LossConfig(ce=0.0, kl=1.0),
    "cap": LossConfig(cap=0.3),
    "all": LossConfig(ce=0.5, kl=0.4, rkl=0.3, tv=0.2, lk=0.1, cap=0.25, decay_gamma=3.0),
}


class Problem:
    """Slots with holes, one block wholly unsupervised, half the labels right."""

    def __init__(self, dtype: torch.dtype = torch.float32, vocab: int = V, blocks: int = M, **extra: float) -> None:
        generator = torch.Generator().manual_seed(vocab + blocks)
        self.hidden = torch.randn(blocks, P, H, generator=generator).to(DEVICE, dtype)
        head = (torch.randn(vocab, H, generator=generator) * 0.6).to(DEVICE, dtype)
        bias = torch.randn(vocab, generator=generator).to(DEVICE, dtype) if extra.pop("bias", 0) else None
        self.vocabulary = Vocabulary(embedding=head, head=head, head_bias=bias, **extra)
        self.teacher = torch.randn(blocks, P, H, generator=generator).to(DEVICE, dtype)
        best = self.vocabulary.logits(self.hidden).argmax(-1)
        other = torch.randint(0, vocab, (blocks, P), generator=generator).to(DEVICE)
        self.labels = torch.where(torch.rand(blocks, P, generator=generator).to(DEVICE) < 0.5, best, other)
        self.supervised = (torch.rand(blocks, P, generator=generator) < 0.7).to(DEVICE)
        self.supervised[3:4] = False

    def run(self, config: LossConfig, implementation: str) -> tuple[LossSums, Tensor]:
        hidden = self.hidden.clone().requires_grad_()
        config = dataclasses.replace(config, implementation=implementation)
        sums = block_loss(hidden, self.labels, self.supervised, self.vocabulary, config, self.teacher)
        sums.mean().backward()
        assert hidden.grad is not None
        return LossSums(**{name: value.detach() for name, value in vars(sums).items()}), hidden.grad

    def compare(self, config: LossConfig, atol: float = 1e-6, rtol: float = 1e-5) -> None:
        (ours, our_gradient), (plain, plain_gradient) = (self.run(config, side) for side in ("fused", "reference"))
        for name, value in vars(plain).items():
            torch.testing.assert_close({name: getattr(ours, name)}, {name: value}, atol=10 * atol, rtol=rtol)
        torch.testing.assert_close(our_gradient, plain_gradient, atol=atol, rtol=rtol)


def test_the_tests_below_hold_in_the_interpreter() -> None:
    hold_in_the_interpreter(__file__)


@kernel_runs
@pytest.mark.parametrize("weighting", ["uniform", "decay", "dpace"])
@pytest.mark.parametrize("terms", TERMS)
def test_value_statistics_and_gradient_are_the_references(terms: str, weighting: str) -> None:
    Problem().compare(dataclasses.replace(TERMS[terms], weighting=weighting))


@kernel_runs
@pytest.mark.parametrize("terms", TERMS)
def test_bfloat16_is_as_near_to_float32_as_the_reference_is(terms: str) -> None:
    exact, rounded = Problem(), Problem(torch.bfloat16)
    exact.hidden, exact.teacher = rounded.hidden.float(), rounded.teacher.float()
    exact.vocabulary = rounded.vocabulary.to(DEVICE, torch.float32)
    exact.labels = rounded.labels
    config = dataclasses.replace(TERMS[terms], cap=0.0)  # its argmax is of the rounded logits
    truth = exact.run(config, "reference")
    errors = {}
    for side in ("fused", "reference"):
        sums, gradient = rounded.run(config, side)
        assert sums.mean().item() == pytest.approx(truth[0].mean().item(), rel=1e-2)
        errors[side] = float((gradient.float() - truth[1]).norm() / truth[1].norm())
    assert errors["fused"] <= 1.5 * errors["reference"]  # the interpreter truncates where the GPU rounds


@kernel_runs
@pytest.mark.parametrize("vocab", [1, 2, 7, 4095, 4096, 4097, 9001])
def test_any_vocabulary_and_a_few_chunks(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_train.kernels import head_loss

    monkeypatch.setattr(head_loss, "LOGITS_BYTES", 3 * P * (vocab + 8) * 4)
    problem = Problem(vocab=vocab)
    problem.compare(TERMS["all"], atol=2e-6, rtol=1e-4)
    problem.compare(dataclasses.replace(TERMS["cap"], weighting="dpace"), atol=2e-6, rtol=1e-4)


@kernel_runs
@pytest.mark.parametrize("blocks", [0, 1])
def test_no_block_and_one_block(blocks: int) -> None:
    problem = Problem(blocks=blocks)
    for terms in TERMS.values():
        problem.compare(terms)


@kernel_runs
@pytest.mark.parametrize("extra", [{"logit_softcap": 3.0}, {"bias": 1.0}, {"bias": 1.0, "logit_softcap": 2.0}])
def test_softcap_and_bias(extra: dict[str, float]) -> None:
    Problem(**extra).compare(TERMS["all"])


@kernel_runs
@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("terms", ["ce", "all"])
def test_logits_of_ten_thousand_and_one_hot_teachers(terms: str, size: float) -> None:
    """q and p are 0 or 1 but for rounding; the terms reach 1e4, and nothing overflows."""
    problem = Problem()
    eye = torch.eye(H, device=DEVICE)
    problem.vocabulary = Vocabulary(embedding=eye, head=eye)
    problem.hidden = torch.where(problem.hidden > 0, size, -size)
    problem.labels = problem.labels % H
    problem.teacher = torch.nn.functional.one_hot(problem.labels, H).to(problem.teacher) * size
    problem.compare(TERMS[terms], atol=1e-4, rtol=1e-5)
    assert problem.run(TERMS[terms], "fused")[1].isfinite().all()


@kernel_runs
def test_what_an_unsupervised_slot_holds_does_not_matter() -> None:
    problem = Problem()
    expected = problem.run(TERMS["all"], "fused")
    for garbage in (float("nan"), float("inf"), 1e30):
        problem.hidden = torch.where(problem.supervised[..., None], problem.hidden, garbage)
        sums, gradient = problem.run(TERMS["all"], "fused")
        assert torch.equal(sums.numerator, expected[0].numerator)
        assert torch.equal(gradient, expected[1])


@kernel_runs
def test_a_state_that_is_not_finite_is_seen_in_value_and_gradient() -> None:
    problem = Problem()
    problem.supervised[0, 0] = True
    problem.hidden[0, 0, 0] = float("nan")
    sums, gradient = problem.run(LossConfig(), "fused")
    assert sums.numerator.isnan()
    assert gradient[0, 0].isnan().any()


@kernel_runs
def test_the_same_input_gives_the_same_bits_also_in_threads() -> None:
    problem = Problem(vocab=5000)
    expected = problem.run(TERMS["all"], "fused")
    barrier = threading.Barrier(3)
    results: list[tuple[LossSums, Tensor]] = []

    def work() -> None:
        barrier.wait(60)
        results.append(problem.run(TERMS["all"], "fused"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 3
    for sums, gradient in results:
        assert torch.equal(sums.numerator, expected[0].numerator)
        assert torch.equal(gradient, expected[1])


@kernel_runs
def test_without_gradients_none_is_made() -> None:
    problem = Problem()
    expected, _ = problem.run(TERMS["all"], "fused")
    config = dataclasses.replace(TERMS["all"], implementation="fused")
    arguments = (problem.hidden, problem.labels, problem.supervised, problem.vocabulary, config, problem.teacher)
    with torch.no_grad():
        sums = block_loss(*arguments)
    assert torch.equal(sums.numerator, expected.numerator)
    assert not block_loss(*arguments).numerator.requires_grad


@kernel_runs
def test_it_stands_inside_compiled_code(clean: None) -> None:
    problem = Problem()
    config = dataclasses.replace(TERMS["all"], implementation="fused")
    expected = problem.run(config, "fused")

    def run(hidden: Tensor) -> Tensor:
        return block_loss(
            hidden * 1.0, problem.labels, problem.supervised, problem.vocabulary, config, problem.teacher
        ).mean()

    hidden = problem.hidden.clone().requires_grad_()
    value = compile_guard.compile(run, backend="aot_eager", fullgraph=True)(hidden)
    value.backward()
    torch.testing.assert_close(value.detach(), expected[0].mean())
    torch.testing.assert_close(hidden.grad, expected[1])


@kernel_runs
def test_a_head_that_wants_a_gradient_is_refused() -> None:
    problem = Problem()
    problem.vocabulary.head.requires_grad_()
    with pytest.raises(ValueError, match="makes no gradient of the output head"):
        problem.run(LossConfig(), "fused")


def test_fused_where_it_cannot_run_is_refused_and_auto_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = Problem()
    for name in ("hidden", "labels", "supervised", "teacher"):
        setattr(problem, name, getattr(problem, name).cpu())
    problem.vocabulary = problem.vocabulary.to("cpu")
    with pytest.raises(ConfigError, match="needs Triton and a GPU, and the states are on cpu"):
        problem.run(LossConfig(), "fused")
    plain, automatic = problem.run(LossConfig(), "reference"), problem.run(LossConfig(), "auto")
    assert torch.equal(plain[1], automatic[1])
