"""The frozen language model that is drafted for: loading, and the hidden states that a drafter reads.

Any causal language model of `transformers` whose decoder has one list of layers. What a model can do is
found out by trying it on a few tokens at loading, never by its name or by the version of `transformers`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dflash_train.chat_tokenizers import ByteTokenizer
from dflash_train.config import ConfigError, DrafterConfig, TargetConfig
from dflash_train.cuda_graph import Graphed
from dflash_train.model_files import TargetError, model_place
from dflash_train.packing import PackedRows
from dflash_train.spread import spread
from dflash_train.target_masks import text_config
from dflash_train.vocabulary import Vocabulary

# `transformers` patches torch's initialisers and default dtype while it builds a model, for the whole process.
_loading = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetStates:
    """What a target hands to a drafter for packed rows. At padding the values are meaningless but finite."""

    taps: Tensor
    """[R, S, K·H], outputs of the tapped layers side by side, in the order in which the taps are listed."""
    final: Tensor
    """[R, S, H], after the final norm: the head's input, hence the teacher."""


class Target:
    """A frozen causal language model on one device, with hooks on the layers that are tapped.

    May be called from several threads; each gets its own states.

    Raises:
        TargetError: no list of decoder layers is found, a layer id is out of range, or the logits are not those of the
            output head (some models scale them in ways that a drafter's server would not repeat).
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], name: str = "target") -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self._decoder, self._layers = _find_decoder(model, name)
        beyond = [i for i in layer_ids if not 0 <= i < len(self._layers)]
        if beyond:
            raise TargetError(f"{name} has layers 0 … {len(self._layers) - 1}, but {beyond} are to be tapped")
        self.layer_ids = tuple(layer_ids)
        self._taken = threading.local()
        # Newer versions of `transformers` call it `cache` and warn of the name that the older ones know.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        for i in set(layer_ids):
            self._layers[i].register_forward_hook(self._take(i))
        self._check_head()
        self.packs_documents = self._try_packing()
        """Whether several documents can share a row of the target itself; else each is run in a row of its own."""
        self.graphs: dict[torch.Size, Graphed] = {}
        """Passes over packed rows of a shape that were captured (`target_graph.capture`)."""

    @property
    def device(self) -> torch.device:
        """Where the weights are; of a target on several devices, the first, where it takes and gives tensors."""
        return self._embedding.device

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._embedding.shape[1]

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens, that its configuration allows; a very large number if it has no such limit."""
        return int(getattr(text_config(self.model), "max_position_embeddings", None) or 2**62)

    @property
    def _embedding(self) -> Tensor:
        weight = self.model.get_input_embeddings().weight  # type: ignore[operator]
        assert isinstance(weight, Tensor)
        return weight.detach()

    def vocabulary(self, embedding_scale: float = 1.0) -> Vocabulary:
        """The target's own embedding and head, not copied."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise TargetError(f"{self.name} has no output head; a causal language model is needed")
        bias = getattr(head, "bias", None)
        weight = head.weight.detach()
        embedding = self._embedding
        tied = weight.data_ptr() == embedding.data_ptr() and weight.shape == embedding.shape
        return Vocabulary(
            embedding=weight if tied else embedding,
            head=weight,
            head_bias=None if bias is None else bias.detach(),
            embedding_scale=embedding_scale,
            logit_softcap=float(getattr(text_config(self.model), "final_logit_softcapping", None) or 0.0),
        )

    @torch.no_grad()
    def states(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> TargetStates:
        """Run packed rows through the target, each document on its own, and collect the states.

        Args:
            tokens: [R, S] int64 on the target's device.
            documents: [R, S] int64, contiguous, -1 for padding (on the right).
            positions: [R, S] int64, position in the document.
        """
        graph = self.graphs.get(tokens.shape)
        if graph is not None:
            taps, final = graph(tokens, documents, positions)
            return TargetStates(taps=taps, final=final)
        if self.packs_documents:
            return self.run(tokens, positions)
        return self._run_each_document(tokens, documents)

    def states_of(self, rows: PackedRows) -> TargetStates:
        """The same for rows on the target's device."""
        return self.states(rows.tokens, rows.documents, rows.positions)

    def check(self, drafter: DrafterConfig) -> None:
        """Whether a drafter fits this target.

        Raises:
            ConfigError: sizes differ, a tap is not hooked, or the mask token has no row in the embedding.
        """
        check_fit(drafter, self.vocabulary(), self.name, self.hidden_size, self.num_layers, self.layer_ids)

    def _take(self, layer: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            taken: dict[int, Tensor] | None = getattr(self._taken, "states", None)
            if taken is not None:
                taken[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def run(self, tokens: Tensor, positions: Tensor, masks: Any = None, cache: Any = None) -> TargetStates:
        """One pass over rows as they are, behind what `cache` holds.

        Args:
            tokens: [R, L] int64 on the target's device.
            positions: [R, L] int64.
            masks: as the decoder takes them: additive [R, 1, L, slots of the cache], one for all layers or by their kind;
                None: causal, and documents are told apart by their positions where `packs_documents`.
            cache: of `transformers`, or what stands in its place; written to. None: nothing is kept.
        """
        self._taken.states = {}
        try:
            final: Tensor = self._decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks,
                use_cache=cache is not None,
                **({} if cache is None else {self._cache_argument: cache}),
            ).last_hidden_state
            tapped = [self._taken.states[i].to(final.device) for i in self.layer_ids]
            taps = torch.cat([final[..., :0], *tapped], dim=-1)
        finally:
            self._taken.states = None
        return TargetStates(taps=taps, final=final)

    def _run_each_document(self, tokens: Tensor, documents: Tensor) -> TargetStates:
        """Padding stands on the right, where a causal or recurrent layer cannot see it from the document."""
        spans = []
        for row, owners in enumerate(documents.cpu()):
            indices, lengths = owners[owners >= 0].unique_consecutive(return_counts=True)
            ends = lengths.cumsum(0).tolist()
            spans += [(row, end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]
            assert len(ends) == len(indices)
        width = self.hidden_size
        taps = self._embedding.new_zeros(*tokens.shape, len(self.layer_ids) * width)
        final = self._embedding.new_zeros(*tokens.shape, width)
        spans.sort(key=lambda span: span[2] - span[1])
        while spans:
            longest = spans[-1][2] - spans[-1][1]
            # Documents of similar length together, in batches no larger than the rows that came in.
            batch = spans[-max(1, tokens.numel() // longest) :]
            del spans[-len(batch) :]
            padded = tokens.new_zeros(len(batch), longest)
            for i, (row, start, end) in enumerate(batch):
                padded[i, : end - start] = tokens[row, start:end]
            out = self.run(padded, torch.arange(longest, device=tokens.device).expand_as(padded))
            for i, (row, start, end) in enumerate(batch):
                taps[row, start:end] = out.taps[i, : end - start]
                final[row, start:end] = out.final[i, : end - start]
        return TargetStates(taps=taps, final=final)

    @torch.no_grad()
    def _check_head(self) -> None:
        tokens = torch.arange(1, 5, device=self.device)[None] % self._embedding.shape[0]
        expected = self.model(input_ids=tokens, use_cache=False).logits.float()
        ours = self.vocabulary().logits(self.run(tokens, torch.arange(4, device=self.device)[None]).final).float()
        scale = expected.abs().max().clamp_min(1e-6)
        difference = float((ours - expected).abs().max() / scale)
        if not difference < 0.02:  # also true of NaN
            raise TargetError(
                f"the logits of {self.name} are not its output head applied to its final hidden states (they differ by "
                f"{difference:.3g} of the largest); such a target is not supported"
            )

    @torch.no_grad()
    def _try_packing(self) -> bool:
        """Two documents in each of two rows: do the second ones stay exactly as they are when the first ones change?"""
        splits = (8, 5)
        positions = torch.stack([torch.cat([torch.arange(n), torch.arange(16 - n)]) for n in splits]).to(self.device)
        tokens = (torch.arange(32, device=self.device).view(2, 16) * 7 + 1) % self._embedding.shape[0]
        changed = tokens.clone()
        for row, split in enumerate(splits):
            changed[row, :split] = (changed[row, :split] + 3) % self._embedding.shape[0]
        before, after = self.run(tokens, positions), self.run(changed, positions)
        for row, split in enumerate(splits):
            moved = not torch.equal(before.final[row, :split], after.final[row, :split])
            still = torch.equal(before.final[row, split:], after.final[row, split:])
            if not (moved and still and torch.equal(before.taps[row, split:], after.taps[row, split:])):
                return False
        return True


def check_fit(
    drafter: DrafterConfig, vocabulary: Vocabulary, name: str, hidden_size: int, num_layers: int, layer_ids: tuple[int, ...]
) -> None:
    """Whether a drafter fits a target of these sizes.

    Raises:
        ConfigError: sizes differ, other layers are tapped, or the mask token has no row in the embedding.
    """
    for field, theirs in (
        ("hidden_size", hidden_size),
        ("vocab_size", vocabulary.head.shape[0]),
        ("num_target_layers", num_layers),
        ("logit_softcap", vocabulary.logit_softcap),
    ):
        ours = getattr(drafter, field)
        if ours != theirs:
            raise ConfigError(
                f"drafter.{field} is {ours}, but {name} has {theirs}; --set drafter.{field}={theirs}"
            )
    if drafter.mask_token_id >= vocabulary.embedding.shape[0]:
        raise ConfigError(
            f"drafter.mask_token_id is {drafter.mask_token_id}, but the embedding of {name} has "
            f"{vocabulary.embedding.shape[0]} rows; take a row that no text uses, never resize the embedding"
        )
    if drafter.taps != layer_ids:
        raise ConfigError(f"drafter taps layers {drafter.taps}, but {name} was loaded to tap {layer_ids}")


def load_target(config: TargetConfig, layer_ids: Sequence[int], *devices: torch.device | str) -> Target:
    """Load a target from a local folder, a .gguf file, or make the `tiny` one. Safe in several threads at once.

    It is on the CPU if no device is given, and its layers are shared out where several are.

    Nothing is downloaded, and code that comes with a folder runs only with `config.trust_remote_code`.

    Raises:
        TargetError: the path is not there or does not hold a causal language model.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    with _loading:
        if config.path == "tiny":
            model = tiny_model(config.seed).to(dtype)
        else:
            model = _load_model(Path(config.path), dtype, config.trust_remote_code)
    places = [torch.device(device) for device in devices or ("cpu",)]
    if len(places) == 1:
        return Target(model.to(places[0]), layer_ids, name=config.path)
    return Target(spread(model, _find_decoder(model, config.path)[1], places), layer_ids, name=config.path)


class LoadTarget(Protocol):
    """Makes a target: `load_target`, or a program's own."""

    def __call__(self, config: TargetConfig, layer_ids: Sequence[int], /, *devices: torch.device) -> Target:
        """The target of these settings on these devices, with these layers tapped."""


def _load_model(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    place = model_place(path)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            **place, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(f"{path} could not be loaded as a causal language model: {reason}") from error
    return model


def tiny_model(seed: int) -> nn.Module:
    """A random byte-level Qwen3 of six layers and width 64, certain enough of its next token to be learnt."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model: nn.Module = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=ByteTokenizer.vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name:
            continue
        # A strong embedding and head make the text depend on the last token or two; the layers add some context.
        std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.8}.get(name, 0.15)
        parameter.data.normal_(0.0, std, generator=generator)
    # What it must not write: a zero row loses against the best of 256 random ones.
    model.get_parameter("lm_head.weight").data[list(ByteTokenizer.suppressed_ids)] = 0.0
    return model


def _find_decoder(model: nn.Module, name: str) -> tuple[nn.Module, nn.ModuleList]:
    """The module that maps token ids to final states, and its layers (a wrapper for images may stand around it)."""
    num_layers = text_config(model).num_hidden_layers
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and len(module.layers) == num_layers  # type: ignore[arg-type]
        and hasattr(module, "embed_tokens")
    ]
    if len(found) != 1:
        raise TargetError(
            f"{name} ({type(model).__name__}) has {len(found)} modules with {num_layers} layers and an embedding, "
            "where one decoder is expected"
        )
    layers = found[0].layers
    assert isinstance(layers, nn.ModuleList)
    return found[0], layers
