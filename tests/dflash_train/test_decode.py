"""Decoding: lossless in every mode, exact bookkeeping of caches, and where answers end."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from decoding import TARGETS, WAYS, oracle, random_prompts, tiny_decoder
from tiny import hidden_states, make_anchors, make_rows, qwen3, spread, tiny_config, tiny_drafter, tiny_vocabulary
from torch import Tensor, nn

from dflash_train import decode
from dflash_train.caches import DrafterCache, ReplayCache, SlotCache, open_cache
from dflash_train.config import ConfigError
from dflash_train.ddtree import build_tree, chain_tree
from dflash_train.decode import DecodeConfig, Decoder, Mode, PromptLookup, sampling_probs
from dflash_train.model_files import TargetError
from dflash_train.target_masks import TargetMasks
from dflash_train.targets import Target

transformers = pytest.importorskip("transformers")


def compare_with_plain(decoder: Decoder, count: int, patch: pytest.MonkeyPatch, batch: int = 25, length: int = 20) -> None:
    config = DecodeConfig(max_new_tokens=length)
    prompts = random_prompts(count)
    taus: dict[tuple[Mode, int | None], list[int]] = {way: [] for way in WAYS}
    different = 0
    for start in range(0, count, batch):
        part = prompts[start : start + batch]
        plain = [g.tokens for g in decoder.generate(part, "ar", config).generations]
        patch.setattr(decode._Run, "_draft", oracle(plain, 0.7, seed=start))
        for mode, budget in WAYS:
            out = decoder.generate(part, mode, config, budget=budget).generations
            different += sum(g.tokens != text for g, text in zip(out, plain, strict=True))
            taus[mode, budget] += [n for g in out for n in g.emitted]
    for (mode, budget), emitted in taus.items():
        print(f"\n  {mode} {budget or ''}: {count} prompts, tau {sum(emitted) / len(emitted):.2f}", end="")
    assert different == 0
    chain, tree = (sum(taus[way]) / len(taus[way]) for way in (WAYS[0], WAYS[2]))
    assert tree > chain > 1.5


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_greedy_chain_tree_and_lookup_write_what_plain_decoding_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_with_plain(tiny_decoder(TARGETS[name]), 200, monkeypatch)


def test_a_recurrent_target_writes_the_same_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """lucebox #414: a state that is rolled back inexactly made tree acceptance fall below the chain's."""
    compare_with_plain(tiny_decoder(TARGETS["hybrid"]), 4, monkeypatch, batch=4, length=12)


@pytest.mark.stress
def test_a_recurrent_target_writes_the_same_on_more_prompts(monkeypatch: pytest.MonkeyPatch, stress_iterations: int) -> None:
    """Its state is replayed, path by path, so this is slow: `--stress-iterations 200` takes 200 prompts, and minutes."""
    compare_with_plain(tiny_decoder(TARGETS["hybrid"]), stress_iterations, monkeypatch, length=8)


@pytest.mark.parametrize("name", TARGETS)
def test_a_real_drafters_drafts_change_nothing_either(name: str) -> None:
    decoder = tiny_decoder(TARGETS[name])
    prompts, config = random_prompts(4, seed=1), DecodeConfig(max_new_tokens=10)
    plain = decoder.generate(prompts, "ar", config).generations
    for mode, budget in WAYS:
        out = decoder.generate(prompts, mode, config, budget=budget).generations
        assert [g.tokens for g in out] == [g.tokens for g in plain]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_plain_decoding_is_that_of_transformers(name: str) -> None:
    decoder = tiny_decoder(TARGETS[name])
    for prompt in random_prompts(5, seed=2):
        out = decoder.generate([prompt], "ar", DecodeConfig(max_new_tokens=20)).generations[0]
        generated = decoder.target.model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        assert out.tokens == generated[0, len(prompt) :].tolist()


SAMPLES = 50_000


def next_three(decoder: Decoder, prompt: list[int], config: DecodeConfig) -> Tensor:
    """[V, V, V] probabilities of the first three tokens, from the target's own model."""
    vocab = decoder.target.vocabulary().head.shape[0]
    pairs = torch.tensor(list(itertools.product(range(vocab), repeat=2)))
    text = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
    logits = decoder.target.model(input_ids=text).logits[:, len(prompt) - 1 :]
    p = sampling_probs(logits, config.temperature, config.top_p).view(vocab, vocab, 3, vocab)
    return p[0, 0, 0, :, None, None] * p[:, 0, 1, :, None] * p[:, :, 2]


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """p-value and degrees of freedom; cells expected fewer than 5 times are one cell."""
    expected = probs.flatten().double() * counts.sum()
    common = expected >= 5
    seen = torch.cat([counts.flatten()[common], counts.flatten()[~common].sum()[None]]).double()
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted).square() / wanted).sum()
    freedom = len(wanted) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2)), freedom


@pytest.mark.parametrize(
    ("mode", "budget", "temperature", "top_p"),
    [
        ("ar", None, 1.0, 1.0),
        ("chain", None, 1.0, 1.0),
        ("ddtree", 4, 1.0, 1.0),
        ("ddtree", 10, 1.0, 1.0),
        ("lookup", None, 1.0, 1.0),
        ("chain", None, 0.7, 0.8),
        ("ddtree", 4, 0.7, 0.8),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(mode: Mode, budget: int | None, temperature: float, top_p: float) -> None:
    """The joint distribution of three tokens, so that what follows an accepted and a refused draft is judged too."""

    def make() -> nn.Module:
        sizes = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
        model: nn.Module = transformers.Qwen3ForCausalLM(config)
        return model

    decoder = tiny_decoder(make, num_taps=1)
    with torch.no_grad():  # a softer target, so that many triples are likely
        decoder.target.model.get_output_embeddings().weight.mul_(0.5)  # type: ignore[operator]
    prompt, rows = [1, 2, 1, 2], 2500
    counts = torch.zeros(9, 9, 9)
    steps = emitted = 0
    for seed in range(SAMPLES // rows):
        config = DecodeConfig(max_new_tokens=3, temperature=temperature, top_p=top_p, seed=seed)
        out = decoder.generate([prompt] * rows, mode, config, budget=budget).generations
        triples = torch.tensor([g.tokens for g in out])
        counts.index_put_(tuple(triples.unbind(1)), torch.ones(rows), accumulate=True)
        steps += sum(len(g.emitted) for g in out)
        emitted += sum(sum(g.emitted) for g in out)
    probs = next_three(decoder, prompt, config)
    p_value, freedom = chi_square(counts, probs)
    print(f"\n  {mode} {budget or ''} T={temperature} top_p={top_p}: p = {p_value:.3f}, {freedom} degrees of freedom, "
          f"{int(counts.sum())} samples, tau {emitted / steps:.2f} of at most 2", end="")  # fmt: skip
    assert counts.sum() == SAMPLES
    assert not counts[probs == 0].any()
    assert p_value > 1e-3
    assert mode == "ar" or emitted / steps > 1.05


def test_the_chi_square_notices_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting by the drafter's word alone must fail the test above: the test has power, with a fifth of its samples."""
    monkeypatch.setattr(sys.modules[__name__], "SAMPLES", 10_000)
    monkeypatch.setattr(decode, "accept_chain", lambda drafts, q, p, g, real=decode.accept_chain: real(drafts, q * 0, p, g))
    with pytest.raises(AssertionError, match=r"> 0\.001"):
        test_sampled_tokens_have_the_targets_distribution("chain", None, 1.0, 1.0)


@pytest.mark.parametrize("name", TARGETS)
def test_a_kept_path_leaves_the_cache_as_if_it_alone_had_been_run(name: str) -> None:
    """Compaction against recomputation from scratch, with rows that keep different numbers of tokens."""
    decoder = tiny_decoder(TARGETS[name])
    target = decoder.target
    prompts = random_prompts(3, seed=3, longest=9)
    generator = torch.Generator().manual_seed(0)
    cache = open_cache(target, 3, 64)
    texts = [list(prompt) for prompt in prompts]
    with torch.no_grad():
        cache.prefill(prompts)
        for _ in range(4):
            tree = build_tree(torch.randint(0, 110, (3,), generator=generator), torch.randn(3, 3, 120, generator=generator), 12)
            cache.verify(tree)
            deepest = tree.depths.argmax(1)
            # A path that skips nodes, cut at another length in each row; a count of 0 keeps the row.
            nodes = [[i for i in range(13) if tree.ancestors[r, int(deepest[r]), i]] for r in range(3)]
            counts = [int(torch.randint(0, len(path) + 1, (1,), generator=generator)) for path in nodes]
            padded = torch.tensor([(path + [12] * 4)[:4] for path in nodes])
            cache.keep(tree, padded, torch.tensor(counts))
            for row, (path, count) in enumerate(zip(nodes, counts, strict=True)):
                texts[row] += tree.tokens[row, path[:count]].tolist()
        assert cache.lengths.tolist() == [len(text) for text in texts]
        assert max(cache.lengths.tolist()) > 9
        fresh = open_cache(target, 3, 64)
        fresh.prefill(texts)
        root = chain_tree(torch.tensor([5, 6, 7]), torch.zeros(3, 0, dtype=torch.int64))
        worst = float((cache.verify(root).final - fresh.verify(root).final).abs().max())
        if isinstance(cache, SlotCache):
            assert isinstance(fresh, SlotCache)
            for layer, stores in cache._store._layers.items():
                for ours, theirs in zip(stores, fresh._store._layers[layer], strict=True):
                    for row, text in enumerate(texts):
                        part = slice(None), slice(0, len(text))
                        worst = max(worst, float((ours[row][part] - theirs[row][part]).abs().max()))
    print(f"\n  {name}: largest difference {worst:.1e}", end="")
    assert worst < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5, "sliding_rule": "speculators"},
        {"attention": "eager"},
    ],
)
def test_a_block_behind_cached_context_is_the_drafters_own_forward(changes: dict[str, object]) -> None:
    """And nothing of the target at the anchor or later moves it (SpecForge #533, z-lab #41)."""
    config = tiny_config(**changes)
    drafter, vocabulary, rows = tiny_drafter(config), tiny_vocabulary(config), make_rows([[24], [24]], 24, config)
    anchors = [11, 18]
    with torch.no_grad():
        blocks = rows.blocks(make_anchors([[a] for a in anchors], 1), config)
        wanted = hidden_states(drafter, vocabulary, rows, make_anchors([[a] for a in anchors], 1))
        cache = DrafterCache(drafter, 2, 40)
        # In pieces, the second of which overlaps what the first one wrote too far.
        cache.extend(rows.taps[:, :9], torch.zeros(2, dtype=torch.int64))
        cache.extend(rows.taps[:, 7:24], torch.full((2,), 7))
        states = vocabulary.embed(blocks.ids)
        got = cache.draft(states, torch.tensor(anchors))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        for pair in cache._layers:
            for store in pair:
                for row, anchor in enumerate(anchors):
                    store[row, :, anchor:] = 1e3
        assert torch.equal(cache.draft(states, torch.tensor(anchors)), got)
        cache._layers[0][1][:, :, 10] += 1.0  # the last context that both anchors see through a window of 5
        assert not torch.equal(cache.draft(states, torch.tensor([11, 12])), got)


def test_tau_counts_the_bonus_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelOpt and speculators count otherwise. All drafts right: the block size. All wrong: 1."""
    decoder = tiny_decoder(qwen3)
    prompt, config = [3, 1, 4], DecodeConfig(max_new_tokens=17)
    plain = decoder.generate([prompt], "ar", config).generations[0]
    assert (plain.tau, plain.emitted) == (1.0, [1] * 16)
    for mode, budget in WAYS[:2]:
        monkeypatch.setattr(decode._Run, "_draft", oracle([plain.tokens], 1.0, margin=20.0))
        out = decoder.generate([prompt], mode, config, budget=budget)
        assert out.generations[0].emitted == [4, 4, 4, 4]
        assert (out.generations[0].tau, out.num_steps) == (4.0, 4)
    wrong = [(token + 1) % 110 for token in plain.tokens]
    monkeypatch.setattr(decode._Run, "_draft", oracle([wrong], 1.0))
    assert decoder.generate([prompt], "chain", config).generations[0].emitted == [1] * 16


@pytest.mark.parametrize("name", TARGETS)
def test_a_batch_of_two_is_each_alone(name: str) -> None:
    """Each row accepts by itself, and padding, neighbours and rows that ended are not seen."""
    decoder = tiny_decoder(TARGETS[name])
    prompts = [[5, 6, 5, 6, 5, 6, 5], [9, 8]]
    alone = [decoder.generate([p], "ar", DecodeConfig(max_new_tokens=14)).generations[0] for p in prompts]
    config = DecodeConfig(max_new_tokens=14, stop_ids=(alone[1].tokens[5],))
    for mode, budget in [("ar", None), *WAYS]:
        both = decoder.generate(prompts, mode, config, budget=budget).generations
        for prompt, together in zip(prompts, both, strict=True):
            single = decoder.generate([prompt], mode, config, budget=budget).generations[0]
            assert (together.tokens, together.emitted, together.finish) == (single.tokens, single.emitted, single.finish)


@pytest.mark.parametrize(("mode", "budget"), WAYS[:2])
def test_rows_that_ended_early_in_the_longest_prompt_stay_in_range(
    mode: Mode, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(qwen3)
    prompts, config = [list(range(1, 13)), [4]], DecodeConfig(max_new_tokens=10)
    plain = [g.tokens for g in decoder.generate(prompts, "ar", config).generations]
    # The long row is told everything and ends at once, the short one is told nothing.
    monkeypatch.setattr(decode._Run, "_draft", oracle([plain[0] + plain[0], [1] * 20], 1.0))
    out = decoder.generate(prompts, mode, config, budget=budget).generations
    assert [g.tokens for g in out] == plain
    assert len(out[0].emitted) < len(out[1].emitted)


@pytest.mark.parametrize(("mode", "budget"), WAYS[:3])
def test_a_stop_token_inside_an_accepted_run_ends_the_answer_there(
    mode: Mode, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(qwen3)
    text = decoder.generate([[3, 1, 4]], "ar", DecodeConfig(max_new_tokens=20)).generations[0].tokens
    for place in range(8):
        stop = text[place]
        end = text.index(stop) + 1
        monkeypatch.setattr(decode._Run, "_draft", oracle([text], 1.0, margin=20.0))
        config = DecodeConfig(max_new_tokens=20, stop_ids=(stop,))
        out = decoder.generate([[3, 1, 4]], mode, config, budget=budget).generations[0]
        assert (out.tokens, out.finish) == (text[:end], "stop")
        assert sum(out.emitted) == end - 1


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_an_answer_is_never_longer_than_allowed(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(qwen3)
    text = decoder.generate([[3, 1, 4]], "ar", DecodeConfig(max_new_tokens=12)).generations[0].tokens
    monkeypatch.setattr(decode._Run, "_draft", oracle([text], 1.0))
    out = decoder.generate([[3, 1, 4]], "chain", DecodeConfig(max_new_tokens=length)).generations[0]
    assert (out.tokens, out.finish) == (text[:length], "length")


def test_suppressed_tokens_are_never_written() -> None:
    decoder = tiny_decoder(qwen3)
    prompts = random_prompts(4)
    free = decoder.generate(prompts, "ar", DecodeConfig(max_new_tokens=12)).generations
    banned = tuple({g.tokens[1] for g in free})
    config = DecodeConfig(max_new_tokens=12, suppressed_ids=banned)
    plain = [g.tokens for g in decoder.generate(prompts, "ar", config).generations]
    assert not {token for text in plain for token in text} & set(banned)
    for mode, budget in WAYS:
        assert [g.tokens for g in decoder.generate(prompts, mode, config, budget=budget).generations] == plain


def test_lookup_copies_what_followed_the_longest_latest_match() -> None:
    assert PromptLookup([1, 2, 3, 9, 2, 3, 7, 1, 2, 3]).propose(3) == [9, 2, 3]  # 1 2 3, not the later 2 3
    assert PromptLookup([2, 3, 9, 5, 2, 3, 7, 4, 2, 3]).propose(2) == [7, 4]
    assert PromptLookup([8, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]
    assert PromptLookup([4]).propose(2) == [4, 4]


def test_the_nucleus_keeps_the_token_that_crosses_top_p() -> None:
    probs = sampling_probs(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 1.0, 0.6)
    torch.testing.assert_close(probs, torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(sampling_probs(torch.tensor([[0.0, 1.0]]), 0.5), torch.tensor([[0.0, 2.0]]).softmax(-1))


def test_kinds_of_targets_get_the_cache_that_fits() -> None:
    assert isinstance(open_cache(tiny_decoder(TARGETS["gemma3"]).target, 1, 8), SlotCache)
    assert isinstance(open_cache(tiny_decoder(TARGETS["hybrid"]).target, 1, 8), ReplayCache)


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_targets_with_one_mask_for_all_layers_work_too(kind: str) -> None:
    sizes = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    window = {"sliding_window": 5} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2, num_hidden_layers=6, **window)

    decoder = tiny_decoder(lambda: getattr(transformers, f"{kind}ForCausalLM")(config))
    prompts, settings = random_prompts(3, longest=9), DecodeConfig(max_new_tokens=12)
    plain = decoder.generate(prompts, "ar", settings).generations
    for prompt, ours in zip(prompts, plain, strict=True):
        text = torch.tensor([prompt + ours.tokens[:-1]])
        best = decoder.target.model(input_ids=text).logits[0, len(prompt) - 1 :].argmax(-1)
        assert best.tolist() == ours.tokens
    for mode, budget in WAYS:
        out = decoder.generate(prompts, mode, settings, budget=budget).generations
        assert [g.tokens for g in out] == [g.tokens for g in plain]


def test_a_target_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(spread(qwen3()), (1,))
    real = TargetMasks._additive
    monkeypatch.setattr(TargetMasks, "_additive", lambda self, seen: real(self, torch.ones_like(seen)))
    with pytest.raises(TargetError, match="other hidden states with a cache"):
        Decoder(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], "tree", None), "one of ar, chain, ddtree, lookup, got 'tree'"),
        (([[1]], "ddtree", None), "budget is the number of drafted nodes"),
        (([[1]], "chain", 4), "got 4 for chain"),
        (([[1]], "ddtree", 0), "at least 1 drafted node, got 0"),
        (([], "ar", None), "no prompt"),
        (([[1], []], "ar", None), "prompt 1 is empty"),
        (([[1, 120]], "ar", None), "token 120, but the embedding has rows 0 … 119"),
    ],
)
def test_bad_calls_are_refused_in_a_sentence(arguments: tuple[list[list[int]], Mode, int | None], message: str) -> None:
    prompts, mode, budget = arguments
    with pytest.raises(ConfigError, match=message):
        tiny_decoder(qwen3).generate(prompts, mode, DecodeConfig(), budget=budget)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_new_tokens": 0}, "got 0"), ({"temperature": -1.0}, "got -1.0"), ({"top_p": 0.0}, "got 0.0")],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**settings)  # type: ignore[arg-type]


def test_a_mode_that_needs_a_drafter_says_so() -> None:
    with pytest.raises(ConfigError, match="chain needs a drafter"):
        Decoder(Target(spread(qwen3()), (1,))).generate([[1]], "chain", DecodeConfig())
