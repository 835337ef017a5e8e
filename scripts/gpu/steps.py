"""Decoding steps at the real sizes of Qwen3-Coder-30B-A3B and GPT-OSS-20B, with random weights and SYNTHETIC acceptance.

Everything of a step is run: draft, verify, commit. Drawn are the tokens that are verified (a random head repeats one), and how many of
them count as accepted, at the rates that were published for real heads (vLLM pull request 32628, HumanEval, K = 8; beyond, each
position keeps 0.6 of the one before). Random routers spread tokens evenly over experts, which real ones do not: `routing` "alike" is
the other end, all tokens to the same experts.
"""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.bench.timing import drafting_seconds, median_seconds
from peagle_jax.decode import loop
from peagle_jax.decode.drafters import METHODS
from peagle_jax.decode.loop import DecodeSpec
from peagle_jax.decode.verify import verify_greedy
from peagle_jax.draft.head import HeadConfig
from peagle_jax.kernels import experts
from peagle_jax.layers import Rope
from peagle_jax.pipelines import tracing
from peagle_jax.types import DecodeState, DraftState, KVGroup, Model
from peagle_jax.weights import flatten_params, unflatten_params

ROOT = Path(__file__).parents[2]
RATES = {
    "peagle": (63, 38, 23, 14, 9, 5, 3, 2),
    "eagle3": (71, 49, 32, 21, 14, 9, 5, 3),
}  # %, of all drafts at a position
CONTEXT, STEPS = 1024, 16
TINY = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: `layers` None is all of them."""

    target: str
    method: str  # none, peagle, eagle3
    k: int
    batch: int
    layers: int | None = None

    @property
    def name(self) -> str:
        depth = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.target}{depth}, {self.method} K={self.k}, batch {self.batch}"


QWEN, OSS = "qwen3-coder-30b-a3b-instruct", "gpt-oss-20b"
RECIPES = {QWEN: ("qwen3_coder_30b", "blocks"), OSS: ("gpt_oss_20b", "rows")}


def cases(tiny: bool) -> list[Case]:
    """The most telling first: whole targets; then every K and batch on six layers of each: how costs grow, but no speedups."""
    if tiny:
        return [
            Case(t, m, k, 2, 2)
            for t in RECIPES
            for m, k in (("none", 0), ("peagle", 3), ("eagle3", 2))
        ]
    whole = [Case(QWEN, "none", 0, 1), Case(QWEN, "peagle", 7, 1), Case(QWEN, "eagle3", 3, 1)]
    whole += [
        Case(OSS, "none", 0, 1),
        Case(OSS, "peagle", 7, 1),
        Case(OSS, "eagle3", 3, 1),
        Case(QWEN, "none", 0, 8),
    ]
    whole += [Case(QWEN, "peagle", 7, 8), Case(QWEN, "eagle3", 3, 8)]
    sweep = [
        Case(target, method, k, batch, 6)
        for target in RECIPES
        for batch in (1, 8, 32)
        for method, k in [
            ("none", 0),
            *[(m, k) for k in (7, 3, 1, 5, 11, 16) for m in ("peagle", "eagle3")],
        ]
    ]
    return whole + sweep


def models(case: Case, tiny: bool) -> tuple[Model, Model | None]:
    """(target, head), shapes only. FP8; GPT-OSS's experts in MXFP4; the head in FP8, of one layer for EAGLE-3."""
    recipe, fp8 = RECIPES[case.target]
    hf = json.loads((ROOT / f"configs/targets/{case.target}.json").read_text())
    run, _, head = tracing.recipe(ROOT / f"configs/train/{recipe}.yaml", ROOT / "configs/targets")
    aux_hidden_state_layers = run.head.aux_hidden_state_layers
    if case.layers is not None:
        hf["num_hidden_layers"], aux_hidden_state_layers = (
            case.layers,
            (0, case.layers // 2, case.layers - 1),
        )
        if "layer_types" in hf:
            hf["layer_types"] = hf["layer_types"][: case.layers]
    if tiny:
        hf |= {key: value for key, value in TINY.items() if key in hf}
        hf |= {key: 8 for key in ("num_experts", "num_local_experts") if key in hf}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(hf))
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        target = tracing.abstract_target(
            path,
            dtype=dtype,
            aux_hidden_state_layers=aux_hidden_state_layers,
            packed=case.target == OSS,
            fp8=fp8,
        )
    if case.method == "none":
        return target, None
    c = target.config
    config: HeadConfig = dataclasses.replace(
        head.config, aux_hidden_state_layers=c.aux_hidden_state_layers, dtype=c.dtype
    )
    if tiny:
        rope = Rope.from_hf({"rope_theta": 1e4}, 32, "tiny")
        sizes = dict(
            vocab=c.vocab,
            draft_vocab=c.vocab,
            dim=c.dim,
            target_dim=c.dim,
            heads=4,
            kv_heads=2,
            head_dim=32,
            mlp_dim=64,
        )
        config = dataclasses.replace(config, **sizes, rope=rope, mask_token=c.vocab - 1)
    if case.method == "eagle3":
        config = dataclasses.replace(
            config, layers=1, mask_token=None, num_depths=None, windows=(None,)
        )
    return target, tracing.abstract_head(config, fp8=True)


def filled(shapes, key, *, alike: bool = False):
    """Random parameters of those shapes; routers of zeros where all tokens shall choose alike."""
    made, paths = {}, {path for path, _ in flatten_params(shapes)}
    for i, (path, x) in enumerate(flatten_params(shapes)):
        parent, _, kind = path.rpartition(".")
        if alike and "router" in path:
            made[path] = jnp.zeros(x.shape, x.dtype)
        elif (
            kind == "scale" and f"{parent}.values" in paths
        ):  # of FP8 values below 2; other scales are norms'
            made[path] = jnp.full(x.shape, 0.02, x.dtype)
        elif kind == "scale" or jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.uint8:
            made[path] = jnp.full(x.shape, kind == "scale", x.dtype)
        else:
            kind = "embed" if path.startswith("embed") else kind
            made[path] = _random(jax.random.fold_in(key, i), x.shape, jnp.dtype(x.dtype).name, kind)
    return unflatten_params(made)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random(key, shape, dtype: str, kind: str):
    if dtype == "float8_e4m3fn":
        return jax.lax.bitcast_convert_type(
            jax.random.bits(key, shape, jnp.uint8) & 0xBF, jnp.float8_e4m3fn
        )
    if dtype == "uint8":
        return (
            jnp.full(shape, 120, jnp.uint8)
            if kind == "scales"
            else jax.random.bits(key, shape, jnp.uint8)
        )
    scale = (
        1 if kind == "embed" else 0.02
    )  # tokens are told apart, and choose experts by themselves
    return (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def start(spec: DecodeSpec, target: Model, head: Model | None, batch: int, key) -> DecodeState:
    """As after a prompt of CONTEXT tokens, with random caches."""
    keys = iter(jax.random.split(key, 1000))

    def some(x):
        return jax.random.normal(next(keys), x.shape, jnp.bfloat16).astype(x.dtype)

    def fill(cache):
        return jax.tree.map(
            lambda x: jnp.full_like(x, CONTEXT - 1) if x.dtype == jnp.int32 else some(x), cache
        )

    R, K, zero = spec.k + 1, spec.k, jnp.zeros(batch, jnp.int32)
    draft = DraftState(fill(spec.drafter.init(batch, spec.cache_size + K)) if head else None, None)
    tokens = jax.random.randint(key, (batch, R), 0, target.config.vocab)
    aux_hidden_states = jax.random.normal(
        key,
        (batch, R, len(target.config.aux_hidden_state_layers) * target.config.dim),
        jnp.bfloat16,
    ).astype(target.config.dtype)
    return DecodeState(
        cache=fill(target.config.empty_cache(batch, spec.cache_size)),
        draft=draft,
        tokens=tokens,
        aux_hidden_states=aux_hidden_states,
        count=zero + 1,
        output=jnp.zeros((batch, spec.cache_size), jnp.int32),
        is_draft=jnp.zeros((batch, spec.cache_size), bool),
        emitted=zero,
        length=zero,
        done=zero < 0,
        num_drafts=zero,
        num_accepted_per_pos=jnp.zeros((batch, K), jnp.int32),
    )


def chances(method: str, k: int) -> jax.Array:
    """Of a draft to count as accepted where the one before was."""
    rates = [100.0, *RATES[method][:k]]
    while len(rates) < k + 1:
        rates.append(0.6 * rates[-1])
    return jnp.asarray([b / a for a, b in zip(rates, rates[1:], strict=False)], jnp.float32)


def measure(case: Case, ceilings: dict, tiny: bool) -> Iterator[dict]:
    """A row a routing."""
    target, head = models(case, tiny)
    steps = 3 if tiny else STEPS
    cache_size = CONTEXT + (steps + 1) * (case.k + 1) + 8
    drafter = head and METHODS[case.method](head.graph, head.config, case.k)
    config = dataclasses.replace(target.config, cache_dtype=jnp.dtype(jnp.float8_e4m3fn))
    spec = DecodeSpec(target.graph, config, drafter, cache_size, False)
    chance = chances(case.method, case.k) if head else jnp.zeros(0)
    limits, stops, key = (
        jnp.full(case.batch, cache_size, jnp.int32),
        jnp.full(1, -1, jnp.int32),
        jax.random.key(0),
    )

    @jax.jit
    def run(params, draft_params, state):
        def body(carry):
            i, key, state = carry
            key, luck, words = jax.random.split(key, 3)
            module = nnx.merge(spec.target, params)
            drafts, _, draft = loop.propose(spec, draft_params, None, state)
            # a random head repeats one token, which would touch few experts: others are verified in the drafts' place, and wait for them
            block = jax.random.randint(words, state.tokens.shape, 0, config.vocab)
            drafts, block = jax.lax.optimization_barrier((drafts, block))
            out, cache = loop.verify_forward(module, block, state.cache)
            tokens, _ = verify_greedy(block[:, 1:], module.argmax_logits(out.hidden))
            lucky = jax.random.uniform(luck, drafts.shape) < chance[None]
            accepted = jnp.cumprod(lucky.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
            return (
                i + 1,
                key,
                loop.commit(
                    spec,
                    state,
                    draft,
                    cache,
                    out,
                    tokens.astype(jnp.int32),
                    accepted,
                    limits,
                    stops,
                ),
            )

        # as in `loop.run`, a round ends with a question to the host: is every row done?
        return jax.lax.while_loop(
            lambda c: (c[0] < steps) & ~c[2].done.all(), body, (0, key, state)
        )[2].emitted

    length = 1 + float(
        jnp.cumprod(chance).sum()
    )  # few draws were drawn: speeds are at the rates, not at their luck
    draft_params = head and filled(head.params, key)
    for routing in ("even", "alike"):
        params = filled(target.params, key, alike=routing == "alike")
        state = start(spec, dataclasses.replace(target, config=config), head, case.batch, key)
        seconds = (
            median_seconds(lambda params=params, state=state: run(params, draft_params, state), 3)
            / steps
        )
        emitted = float(run(params, draft_params, state).sum()) / steps
        used = experts_read(target, params, state)
        floor = floor_bytes(case, target, head, state, used) / ceilings["copy_bytes_per_s"]
        yield {
            "part": "steps",
            "case": case.name,
            **dataclasses.asdict(case),
            "routing": routing,
            "step_us": 1e6 * seconds,
            "tokens_a_step": length,
            "tokens_drawn": emitted / case.batch,
            "tokens_per_s": case.batch * length / seconds,
            "synthetic_acceptance": True,
            "floor_us": 1e6 * floor,
            "of_floor": floor / seconds,
            "experts_read": used,
        }
        del params, state


def experts_read(target: Model, params, state: DecodeState) -> float:
    """How many experts a layer's share of one verification touches on average: counted on random tokens, as every step verifies them.

    Without `jax.jit`, operation by operation: a second program of all layers would take longer to compile than everything here.
    """
    counts = []

    def counting(form):
        def counted(x, chosen, weight, bank):
            counts.append(jnp.unique(chosen).size)
            return form(x, chosen, weight, bank)

        return counted

    with mock.patch.dict(
        experts.FORMS, {name: counting(form) for name, form in experts.FORMS.items()}
    ):
        loop.verify_forward(target.bind(params), state.tokens, state.cache)
    return sum(counts) / len(counts)


def floor_bytes(
    case: Case, target: Model, head: Model | None, state: DecodeState, used: float
) -> float:
    """Bytes that a step has to read: weights once, `used` experts a layer, caches as far as they are seen."""

    def size(x):
        return x.size * jnp.dtype(x.dtype).itemsize

    share = used / target.config.experts
    read = sum(
        size(x) * (share if ".experts." in path else 1)
        for path, x in flatten_params(target.params)
        if not path.startswith("embed")
    )
    read += sum(
        seen(group, s.window)
        for group, s in zip(state.cache.groups, target.config.cache_shapes(), strict=True)
    )
    if head:
        passes = 1 if case.method == "peagle" else case.k
        mine = {
            path: size(x) for path, x in flatten_params(head.params) if not path.startswith("embed")
        }
        read += sum(n * (1 if path.startswith("fusion") else passes) for path, n in mine.items())
        read += passes * sum(seen(group, None) for group in state.draft.cache.groups)
    return read


def seen(group: KVGroup, window: int | None) -> float:
    """Bytes of keys and values that a token after CONTEXT others sees."""
    return sum(
        x.nbytes / x.shape[2] * min(CONTEXT, window or CONTEXT)
        for x in (*group.k, *group.v, *group.k_scale, *group.v_scale)
    )


def drafting(ceilings: dict, tiny: bool) -> Iterator[dict]:
    """One draft of K tokens, head alone, batch 1: what more tokens cost each method."""
    for method in ("peagle", "eagle3"):
        _, head = models(Case(QWEN, method, 1, 1, 6), tiny)
        head = dataclasses.replace(head, params=filled(head.params, jax.random.key(0)))
        read = sum(
            x.nbytes for path, x in flatten_params(head.params) if not path.startswith("embed")
        )
        seconds = {}
        for k in (1, 3) if tiny else (1, 3, 5, 7, 11, 16):
            drafter = METHODS[method](head.graph, head.config, k)
            seconds[k] = drafting_seconds(head, drafter, batch=1, context=64 if tiny else CONTEXT)
        floor = {"K=1": 1e6 * read / ceilings["copy_bytes_per_s"]}
        times = {f"K={k}": 1e6 * s for k, s in seconds.items()}
        ratios = {f"K={k}": s / seconds[1] for k, s in seconds.items()}
        yield {
            "part": "drafting",
            "shape": f"{method}, batch 1",
            "us": times,
            "floor_us": floor,
            "times_K=1": ratios,
        }
