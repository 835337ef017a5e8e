"""The draft head of P-EAGLE, EAGLE-3 and EAGLE-1 (arXiv:2602.01469, 2503.01840, 2401.15077).

Hidden states of the target and tokens go in, logits over the draft vocabulary come out. The file
reads top to bottom: configuration, layers, head. Semantics follow llama_eagle3.py and
llama_eagle.py of vLLM 0.33, and speculators 0.9.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.draft import placeholders
from peagle_jax.draft.confidence import Calibration, ConfidenceHead, check_confidence
from peagle_jax.draft.fusion import Fusion
from peagle_jax.draft.markov import MarkovHead, check_kind, check_rank
from peagle_jax.draft.repeated_rows import RepeatedRows
from peagle_jax.kernels.cache_write import array_dtype
from peagle_jax.layers import (
    FINAL_HIDDEN_STATE,
    MLP,
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    Rope,
    default_cache_dtype,
    take_rows,
)
from peagle_jax.types import Attend, CacheShape, KVCache, Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shape and options of one draft head, which vLLM's and speculators' configs have as well.

    Attributes:
      vocab: V, of the target and of the head's own embedding.
      draft_vocab: W, of `lm_head`; smaller than `vocab` where the head drafts from a reduced
        vocabulary.
      dim: D, the head's width.
      layers: how many there are.
      mlp_dim: width inside the MLPs.
      heads: N, query heads.
      kv_heads: G, heads of keys and values.
      head_dim: H.
      rope: the rotary embedding.
      norm_eps: epsilon of every norm.
      context: longest sequence (`max_position_embeddings`).
      target_dim: width of one aux hidden state.
      aux_hidden_state_layers: which hidden states of the target the head reads, in vLLM's
        numbering: id i is the residual stream BEFORE layer i, 0 the embedding. An EAGLE-1 head
        reads `FINAL_HIDDEN_STATE`, and nothing else does.
      mask_token: the token id of placeholders; None for a head that only drafts autoregressively.
      num_depths: K, for which the head was trained; None where its folder does not say.
      placeholder_hidden: a name in `placeholders.HIDDEN_DESIGNS`. Like the next three, it means
        nothing where there is no mask token.
      placeholder_token: a name in `placeholders.TOKEN_DESIGNS`.
      placeholder_attention: a name in `placeholder_attention.ATTENTION_DESIGNS`.
      placeholder_context: a name in `placeholder_attention.CONTEXT_DESIGNS`.
      qk_norm: norms of queries and keys, as Qwen3 has them.
      attention_bias: biases in attention.
      norm_before_residual: the first layer's residual is the normed hidden state.
      norm_before_fc: one norm over all aux hidden states, before `fc`.
      fc_norm: one norm over each aux hidden state, before `fc`.
      norm_output: autoregressive drafting feeds back the hidden state AFTER the final norm
        (EAGLE-3.1).
      markov_rank: rank of the bias that the previous token gives a draft's logits; None for a head
        without (`markov.MarkovHead`).
      markov_kind: a name in `markov.KINDS`: what the bias depends on beside that token.
      confidence: whether it has a confidence head (`confidence.ConfidenceHead`).
      confidence_calibration: of that head; None where it has none, or was not calibrated.
      windows: sliding window of each layer, in tokens; None for full attention.
      dtype: of parameters and activations.
    """

    vocab: int
    draft_vocab: int
    dim: int
    layers: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    context: int
    target_dim: int
    aux_hidden_state_layers: tuple[int, ...]
    mask_token: int | None
    num_depths: int | None
    placeholder_hidden: str
    placeholder_token: str
    placeholder_attention: str
    placeholder_context: str
    qk_norm: bool
    attention_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    markov_rank: int | None
    markov_kind: str
    confidence: bool
    confidence_calibration: Calibration | None
    windows: tuple[int | None, ...]
    dtype: DTypeLike

    def __post_init__(self) -> None:
        next_step = "set markov_rank to a number in that range, or to None"
        check_rank(self.markov_rank, self.draft_vocab, self.parallel, "markov_rank", next_step)
        check_kind(self.markov_kind, "markov_kind", "use vanilla")
        calibrated = self.confidence_calibration is not None
        check_confidence(self.confidence, calibrated, self.parallel, "confidence")

    @property
    def parallel(self) -> bool:
        """Whether the head can draft in parallel: it has a mask token and placeholders."""
        return self.mask_token is not None

    @property
    def predicts_features(self) -> bool:
        """Whether it is an EAGLE-1 head: its hidden state stands for the target's final one.

        `fc` joins embedding and hidden state before the first layer, which has no norm before
        attention; there is no final norm, and `lm_head` is the target's.
        """
        return self.aux_hidden_state_layers == (FINAL_HIDDEN_STATE,)

    @property
    def method(self) -> str:
        """How the head was made to draft: "peagle", "eagle3" or "eagle", a name of vLLM's."""
        if self.parallel:
            return "peagle"
        return "eagle" if self.predicts_features else "eagle3"

    @property
    def sizes(self) -> placeholders.Sizes:
        """What the parameters of its placeholders are sized by."""
        return placeholders.Sizes(
            aux_dim=len(self.aux_hidden_state_layers) * self.target_dim,
            dim=self.dim,
            num_placeholders=max(1, (self.num_depths or 2) - 1),
        )

    def kv_heads_of(self, layer: int) -> int:
        """Key-value heads of a layer."""
        return self.kv_heads

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """A KV cache of the head's layers.

        Sliding windows are applied by the attention mask: the cache is too small for rings to pay.
        """
        shape = CacheShape(tuple(range(self.layers)), self.kv_heads, self.head_dim, None)
        return KVCache.empty((shape,), batch, slots, array_dtype(self.kv_cache_dtype))

    @property
    def kv_cache_dtype(self) -> DTypeLike:
        """The dtype of keys and values in the cache."""
        return default_cache_dtype(self.dtype, [self.head_dim])


class Buffer(nnx.Variable):
    """An array that travels with the weights and is never trained."""


class DraftLayer(nnx.Module):
    """A Llama layer. The first one has attention of double width.

    Its input is concat(norm(embedding), norm(fused hidden state)). In an EAGLE-1 head it has
    attention of single width, without a norm before it.
    """

    def __init__(self, cfg: HeadConfig, index: int, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype)

        reads_both = index == 0 and not cfg.predicts_features
        width = 2 * cfg.dim if reads_both else cfg.dim
        self.input_norm = norm() if reads_both or index > 0 else None
        self.hidden_norm = norm() if reads_both else None
        self.attn = Attention(
            width,
            cfg.dim,
            cfg.heads,
            cfg.kv_heads,
            cfg.head_dim,
            cfg.rope,
            bias=cfg.attention_bias,
            qk_norm=cfg.qk_norm,
            eps=cfg.norm_eps,
            window=cfg.windows[index],
            dtype=cfg.dtype,
            rngs=rngs,
        )
        is_injected = cfg.parallel and cfg.placeholder_context == "injected" and index > 0
        # of the fused hidden state, and of the embedding of the token behind it
        self.context_norm = norm() if is_injected else None
        self.context_token_norm = norm() if is_injected else None
        self.mlp_norm = norm()
        self.mlp = MLP(cfg.dim, cfg.mlp_dim, dtype=cfg.dtype, rngs=rngs)
        self.norm_before_residual = cfg.norm_before_residual

    def __call__(
        self,
        x: Float[Array, "B R D"],
        embeddings: Float[Array, "B _ D"],
        positions: Int[Array, "B T"],
        layer: int,
        attend: Attend,
        state: Any,
        rows: Int[Array, "B Q"] | None = None,
        fused: Float[Array, "B R D"] | None = None,
        is_placeholder: Bool[Array, "B T"] | None = None,
        repeated: RepeatedRows | None = None,
    ) -> tuple[Float[Array, "B Q D"], Any]:
        """Only layers with norms of their own for them read `embeddings` and `fused`.

        Where rows are `repeated`, `x` and `embeddings` hold each of R once; elsewhere R is T.
        """
        norm = None  # that `attn` applies to its input
        if self.input_norm is None or self.hidden_norm is None:
            attn_input, residual, norm = x, x, self.input_norm
        else:
            normed = self.hidden_norm(x)
            attn_input = jnp.concatenate([self.input_norm(embeddings), normed], axis=-1)
            residual = normed if self.norm_before_residual else x
        kv_input = None
        if self.context_norm is not None and self.context_token_norm is not None:
            assert fused is not None
            if norm is not None:
                attn_input, norm = norm(attn_input), None
            kv_input = self.context_norm(fused) + self.context_token_norm(embeddings)
            kv_input = kv_input.astype(attn_input.dtype)
            if is_placeholder is not None:
                kv_input = jnp.where(is_placeholder[..., None], attn_input, kv_input)
        inputs = rows, kv_input, norm, repeated
        y, state = self.attn(attn_input, positions, layer, attend, state, *inputs)
        residual = residual if repeated is None else repeated(residual)
        x = (residual if rows is None else take_rows(residual, rows)) + y
        return x + self.mlp(x, self.mlp_norm), state


class DraftHead(nnx.Module):
    """The whole head (EAGLE-3: arXiv:2503.01840; P-EAGLE: arXiv:2602.01469; EAGLE-1: 2401.15077).

    It reads rows of a token and of the target's aux hidden states, and gives each a hidden state:

        fused = head.fuse(aux_hidden_states)                           [B T A] -> [B T D]
        embeddings = head.embed(tokens)                                [B T] -> [B T D]
        hidden, state = head(embeddings, fused, positions, attend, state)      -> [B T D]
        logits = head.compute_logits(hidden)                           [B T D] -> [B T W]

    A is the number of aux hidden state layers times `target_dim`, D the head's width and W its
    draft vocabulary. Tensors are those of vLLM's llama_eagle3.py, or of its llama_eagle.py where
    `cfg.predicts_features`. Decoding and training give the head different attention
    (`types.Attend`). Where `cfg.markov_rank` is not None, `head.markov` has a bias for the logits,
    which `compute_logits` leaves out: it depends on the tokens that are drafted. Where
    `cfg.confidence`, `head.confidence` says how likely drafts are accepted.

    Args:
      cfg: shape and options.
      rngs: for the initial values.
    """

    def __init__(self, cfg: HeadConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = Embedding(cfg.vocab, cfg.dim, dtype=cfg.dtype, rngs=rngs)
        fusion = fc = None
        if cfg.predicts_features:
            fc = Linear(2 * cfg.dim, cfg.dim, dtype=cfg.dtype, rngs=rngs)
        else:
            fusion = Fusion(
                len(cfg.aux_hidden_state_layers),
                cfg.target_dim,
                cfg.dim,
                cfg.norm_eps,
                before_fc=cfg.norm_before_fc,
                norm_per_layer=cfg.fc_norm,
                dtype=cfg.dtype,
                rngs=rngs,
            )
        self.fusion, self.fc = fusion, fc
        # One draw for all parameters of a placeholder, so that layers begin alike with any design.
        keys = iter(jax.random.split(rngs.params(), 8))

        def small_param(shape: tuple[int, ...]) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(next(keys), shape).astype(cfg.dtype))

        mask_hidden = placeholder = None
        if cfg.parallel:
            if placeholders.HIDDEN_DESIGNS[cfg.placeholder_hidden].mask_hidden:
                mask_hidden = small_param((cfg.sizes.aux_dim,))
            if shapes := placeholders.own_shapes(cfg, cfg.sizes):
                params = {name: small_param(shape) for name, shape in shapes.items()}
                placeholder = nnx.Dict(params)
        self.mask_hidden, self.placeholder = mask_hidden, placeholder
        self.layers = nnx.List([DraftLayer(cfg, i, rngs=rngs) for i in range(cfg.layers)])
        has_norm = not cfg.predicts_features
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps, dtype=cfg.dtype) if has_norm else None
        self.lm_head = Linear(cfg.dim, cfg.draft_vocab, dtype=cfg.dtype, rngs=rngs)
        # Target id = draft id + d2t[draft id]. At full vocabulary it would be zero, and is absent.
        is_reduced = cfg.draft_vocab != cfg.vocab
        self.d2t = Buffer(jnp.zeros(cfg.draft_vocab, jnp.int32)) if is_reduced else None
        # last, so that the other parameters begin alike with it and without
        markov = None
        if cfg.markov_rank is not None:
            markov = MarkovHead(
                cfg.vocab,
                cfg.draft_vocab,
                cfg.dim,
                cfg.markov_rank,
                kind=cfg.markov_kind,
                dtype=cfg.dtype,
                rngs=rngs,
            )
        self.markov = markov
        width = cfg.dim + (cfg.markov_rank or 0)
        self.confidence = ConfidenceHead(width, dtype=cfg.dtype) if cfg.confidence else None

    def __call__(
        self,
        embeddings: Float[Array, "B R D"],
        fused: Float[Array, "B R D"],
        positions: Int[Array, "B T"],
        attend: Attend,
        state: Any,
        rows: Int[Array, "B Q"] | None = None,
        is_placeholder: Bool[Array, "B T"] | None = None,
        *,
        recompute: bool = False,
        repeated: RepeatedRows | None = None,
    ) -> tuple[Float[Array, "B Q D"], Any]:
        """Runs the layers over rows of (token embedding, fused hidden state, position).

        A row carries the token that comes AFTER its hidden state, and predicts the token after
        that one (arXiv:2503.01840, section 3).

        Args:
          embeddings: of the tokens, or of placeholders.
          fused: fused hidden states of the positions before, or of placeholders; in autoregressive
            drafting what `feedback` gave.
          positions: of the rows, for the rotary embedding.
          attend: attention, over a KV cache or over packed rows.
          state: of `attend`, such as a `KVCache`; None where it needs none.
          rows: those whose hidden states are wanted; None for all. Of others the last layer has
            keys and values only. It takes attention over a cache.
          is_placeholder: which rows are placeholders; None where none is. Read where
            `cfg.placeholder_context` is "injected".
          recompute: a backward pass keeps the input of each layer, and computes the rest again.
          repeated: which of the R rows of `embeddings` and `fused` each of the T rows has; None:
            each its own. The first layer multiplies rows that are the same once. Only for heads
            whose placeholders `are_alike_by_depth`, and without `rows`.

        Returns:
          The residual stream before the final norm, and the attention state.
        """
        x = fused
        if self.fc is not None:
            x = self.fc(jnp.concatenate([embeddings, fused.astype(embeddings.dtype)], axis=-1))
        for i, layer in enumerate(self.layers):
            wanted = rows if i == len(self.layers) - 1 else None
            run = functools.partial(layer, positions=positions, layer=i, attend=attend, rows=wanted)
            if layer.context_norm is not None:
                run = functools.partial(run, fused=fused, is_placeholder=is_placeholder)
            if i == 0:
                run = functools.partial(run, repeated=repeated)
            run = jax.checkpoint(run) if recompute else run
            x, state = run(x, embeddings, state=state)
        return x, state

    def fuse(self, aux_hidden_states: Float[Array, "*rows A"]) -> Float[Array, "*rows D"]:
        """Aux hidden states of the target in the head's width; features stay as they are."""
        return aux_hidden_states if self.fusion is None else self.fusion(aux_hidden_states)

    def final_norm(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """What `lm_head` reads of the residual stream; a predicted feature is normed already."""
        return hidden if self.norm is None else self.norm(hidden)

    def compute_logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Logits over the draft vocabulary, from the residual stream."""
        return self.lm_head(self.final_norm(hidden))

    def argmax_logits(self, hidden: Float[Array, "*rows D"]) -> Int[Array, "*rows"]:
        """The argmax of `compute_logits`, which a kernel may find without writing them."""
        return self.lm_head.argmax_logits(self.final_norm(hidden))

    def confidence_logits(
        self, normed: Float[Array, "*rows D"], previous: Int[Array, "*rows"]
    ) -> Float[Array, "*rows"]:
        """How likely drafts are accepted if those before them are, as logits without calibration.

        Args:
          normed: hidden states after the final norm.
          previous: the token before each draft, of the target's vocabulary.
        """
        assert self.confidence is not None
        if self.markov is None:
            return self.confidence(normed)
        embedded = self.markov.w1(previous).astype(normed.dtype)
        return self.confidence(jnp.concatenate([normed, embedded], axis=-1))

    def feedback(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """What stands in the place of the fused hidden state in autoregressive drafting."""
        return self.final_norm(hidden) if self.cfg.norm_output else hidden

    def target_ids(self) -> Int[Array, " W"]:
        """The target's token id of every draft id."""
        ids = jnp.arange(self.cfg.draft_vocab)
        return ids if self.d2t is None else ids + self.d2t[...]


def random_head(
    config: HeadConfig,
    *,
    seed: int,
    embedding: Float[Array, "V E"],
    output: Float[Array, "E V"],
    ids: Int[np.ndarray, " W"] | None,
) -> Model:
    """A head to train: random layers, and the target's embedding and output matrix.

    Args:
      config: of the head.
      seed: of the random layers.
      embedding: of the target; copied if E is the head's width, D.
      output: the target's output matrix, likewise; its columns are restricted to the draft
        vocabulary.
      ids: target ids of a reduced draft vocabulary; None at full vocabulary.
    """
    head = Model.from_module(DraftHead(config, rngs=nnx.Rngs(seed)), config)
    params = dict(head.params)
    if ids is not None:
        params["d2t"] = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    if embedding.shape[1] == config.dim:
        columns = output if ids is None else output[:, ids]
        params["embed"] = {"table": jnp.asarray(embedding, config.dtype)}
        params["lm_head"] = {"kernel": jnp.asarray(columns, config.dtype)}
    return dataclasses.replace(head, params=params)
