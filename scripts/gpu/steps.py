"""Decoding steps at the real sizes of Qwen3-Coder-30B-A3B and GPT-OSS-20B, with random weights.

Acceptance is SYNTHETIC. Everything of a step is run: draft, verify, commit. Drawn are the tokens
that are verified (a random head repeats one), and how many of them count as accepted. That is at
the rates that were published for real heads (vLLM pull request 32628, HumanEval, K = 8; beyond,
each position keeps 0.6 of the one before). Random routers spread tokens evenly over experts, which
real ones do not: `routing` "alike" is the other end, where all tokens go to the same experts.
"""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from gpu import step_bytes, thunks
from peagle_jax.bench.timing import drafting_seconds, median_seconds
from peagle_jax.decode import loop
from peagle_jax.decode.drafters import METHODS
from peagle_jax.decode.spec import DecodeSpec
from peagle_jax.decode.verify import verify_greedy
from peagle_jax.draft.head import HeadConfig
from peagle_jax.kernels.graphs import OPTIONS
from peagle_jax.kernels.launch import platform
from peagle_jax.layers import Rope, activation_dtype
from peagle_jax.pipelines import tracing
from peagle_jax.types import DecodeState, DraftState, Model, Params, RowOptions
from peagle_jax.weights import flatten_params, unflatten_params

ROOT = Path(__file__).parents[2]
# percent of all drafts at a position that are accepted
RATES = {
    "peagle": (63, 38, 23, 14, 9, 5, 3, 2),
    "eagle3": (71, 49, 32, 21, 14, 9, 5, 3),
}
CONTEXT, STEPS = step_bytes.CONTEXT, 16
# sizes of a dry run, by the names of a config.json
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
    """One program to measure."""

    target: str
    method: str  # none, peagle, eagle3
    k: int
    batch: int
    layers: int | None = None  # None: all of them

    @property
    def name(self) -> str:
        depth = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.target}{depth}, {self.method} K={self.k}, batch {self.batch}"


QWEN, OSS = "qwen3-coder-30b-a3b-instruct", "gpt-oss-20b"
# target -> (recipe of its head, scales of its FP8 matrices)
RECIPES = {QWEN: ("qwen3_coder_30b", "blocks"), OSS: ("gpt_oss_20b", "rows")}


def cases(tiny: bool) -> list[Case]:
    """The most telling first: whole targets, and then every K and batch on six layers of each.

    Six layers show how costs grow, but no speedups.
    """
    methods = [("none", 0), ("peagle", 7), ("eagle3", 3)]
    if tiny:
        methods = [("none", 0), ("peagle", 3), ("eagle3", 2)]
        return [Case(target, method, k, 2, 2) for target in RECIPES for method, k in methods]
    whole = [
        Case(target, method, k, batch)
        for target, batch in ((QWEN, 1), (OSS, 1), (QWEN, 8))
        for method, k in methods
    ]
    methods = [("none", 0)]
    methods += [(method, k) for k in (7, 3, 1, 5, 11, 16) for method in ("peagle", "eagle3")]
    sweep = [
        Case(target, method, k, batch, 6)
        for target in RECIPES
        for batch in (1, 8, 32)
        for method, k in methods
    ]
    return whole + sweep


def models(case: Case, tiny: bool) -> tuple[Model, Model | None]:
    """(target, head), whose parameters are shapes.

    Both are FP8, as is the target's cache, but GPT-OSS's experts are MXFP4. An EAGLE-3 head has
    one layer.
    """
    recipe, fp8 = RECIPES[case.target]
    hf = json.loads((ROOT / f"configs/targets/{case.target}.json").read_text())
    run, _, head = tracing.recipe(ROOT / f"configs/train/{recipe}.yaml", ROOT / "configs/targets")
    aux_layers = run.head.aux_hidden_state_layers
    if case.layers is not None:
        hf["num_hidden_layers"] = case.layers
        aux_layers = (0, case.layers // 2, case.layers - 1)
        if "layer_types" in hf:
            hf["layer_types"] = hf["layer_types"][: case.layers]
    if tiny:
        hf |= {key: value for key, value in TINY.items() if key in hf}
        hf |= {key: 8 for key in ("num_experts", "num_local_experts") if key in hf}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(hf))
        # kernels multiply 16 bits; a dry run without them takes what a CPU multiplies
        dtype = jnp.float32 if tiny and platform() != "gpu" else jnp.bfloat16
        target = tracing.abstract_target(
            path,
            dtype=dtype,
            aux_hidden_state_layers=aux_layers,
            packed=case.target == OSS,
            fp8=fp8,
        )
    c = dataclasses.replace(target.config, cache_dtype=jnp.dtype(jnp.float8_e4m3fn))
    target = dataclasses.replace(target, config=c)
    if case.method == "none":
        return target, None
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


def filled(shapes: Params, key: jax.Array, *, alike: bool = False) -> Params:
    """Random parameters of those shapes; routers of zeros where all tokens shall choose alike."""
    arrays = {}
    paths = {path for path, _ in flatten_params(shapes)}
    for i, (path, x) in enumerate(flatten_params(shapes)):
        parent, _, name = path.rpartition(".")
        is_index = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.uint8
        if is_index or alike and "router" in path:
            arrays[path] = jnp.zeros(x.shape, x.dtype)
        elif name == "scale":
            # FP8 values are below 2; other scales are those of norms
            scale = 0.02 if f"{parent}.values" in paths else 1
            arrays[path] = jnp.full(x.shape, scale, x.dtype)
        else:
            name = "embed" if path.startswith("embed") else name
            dtype = jnp.dtype(x.dtype).name
            arrays[path] = _random(jax.random.fold_in(key, i), x.shape, dtype, name)
    return unflatten_params(arrays)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random(key, shape, dtype: str, name: str):
    """Random numbers for the parameter `name`."""
    if dtype == "float8_e4m3fn":
        bits = jax.random.bits(key, shape, jnp.uint8) & 0xBF  # below 2, and no NaN
        return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    if dtype == "uint8":
        if name == "scales":
            return jnp.full(shape, 120, jnp.uint8)
        return jax.random.bits(key, shape, jnp.uint8)
    # embeddings are large, so that tokens differ and choose experts by themselves
    scale = 1 if name == "embed" else 0.02
    return (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def initial_state(
    spec: DecodeSpec, target: Model, batch: int, slots: int, key: jax.Array
) -> DecodeState:
    """The state after a prompt of CONTEXT tokens, with random caches of `slots` slots."""
    keys = iter(jax.random.split(key, 1000))

    def fill(x):
        if x.dtype == jnp.int32:  # lengths
            return jnp.full_like(x, CONTEXT - 1)
        numbers = jax.random.normal(next(keys), x.shape, jnp.bfloat16)
        if x.dtype == jnp.uint16:  # a CPU's cache
            return jax.lax.bitcast_convert_type(numbers, jnp.uint16)
        return numbers.astype(x.dtype)

    config, R, K = target.config, spec.k + 1, spec.k
    zero = jnp.zeros(batch, jnp.int32)
    draft_cache = spec.drafter.init(batch, slots + K) if spec.drafter else None
    draft_cache = jax.tree.map(fill, draft_cache)
    aux_dim = len(config.aux_hidden_state_layers) * config.dim
    aux_hidden_states = jax.random.normal(key, (batch, R, aux_dim), jnp.bfloat16)
    return DecodeState(
        cache=jax.tree.map(fill, config.empty_cache(batch, slots)),
        draft=DraftState(draft_cache, None),
        tokens=jax.random.randint(key, (batch, R), 0, config.vocab),
        aux_hidden_states=aux_hidden_states.astype(activation_dtype(config.dtype)),
        count=zero + 1,
        output=jnp.zeros((batch, slots), jnp.int32),
        is_draft=jnp.zeros((batch, slots), bool),
        logprobs=jnp.zeros((batch, slots), jnp.float32),
        emitted=zero,
        length=zero,
        done=zero < 0,
        failed=zero < 0,
        num_steps=zero,
        num_drafts=zero,
        num_draft_tokens=zero,
        num_accepted_per_pos=jnp.zeros((batch, K), jnp.int32),
    )


def chances(method: str, k: int) -> jax.Array:
    """The chance [k] of each draft to count as accepted where the one before was."""
    rates = [100.0, *RATES[method][:k]]
    while len(rates) < k + 1:
        rates.append(0.6 * rates[-1])
    return jnp.asarray([b / a for a, b in zip(rates, rates[1:], strict=False)], jnp.float32)


def run_steps(spec: DecodeSpec, chance: jax.Array, steps: int) -> Callable:
    """A jitted function of (params, draft_params, state) that runs `steps` steps.

    It returns how many tokens each row wrote.

    Args:
      chance: of each draft to count as accepted where the one before was.
    """

    @jax.jit
    def run(params, draft_params, state):
        batch = len(state.tokens)
        slots = state.output.shape[1]
        no_stops = jnp.full((batch, 1), -1, jnp.int32)
        options = RowOptions(jnp.full(batch, slots, jnp.int32), no_stops, None)

        def step(carry):
            i, key, state = carry
            key, luck_key, token_key = jax.random.split(key, 3)
            module = nnx.merge(spec.target, params)
            drafts, _, draft, _ = loop.propose(spec, draft_params, None, state)
            # A random head repeats one token, which would touch few experts. Other tokens are
            # verified in the drafts' place, and wait for the drafts.
            block = jax.random.randint(token_key, state.tokens.shape, 0, spec.target_config.vocab)
            drafts, block = jax.lax.optimization_barrier((drafts, block))
            out, cache = loop.verify_forward(module, block, state.cache)
            tokens, _ = verify_greedy(block[:, 1:], module.argmax_logits(out.hidden))
            lucky = jax.random.uniform(luck_key, drafts.shape) < chance[None]
            accepted = jnp.cumprod(lucky.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
            tokens = tokens.astype(jnp.int32)
            state = loop.commit(spec, state, draft, cache, out, tokens, accepted, options)
            return i + 1, key, state

        def goes_on(carry):
            """As in `loop.decode`, a step ends with a question: is every row done?"""
            i, _, state = carry
            return (i < steps) & ~state.done.all()

        _, _, state = jax.lax.while_loop(goes_on, step, (0, jax.random.key(0), state))
        return state.emitted

    return run


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of a case, and what its arguments are made of.

    Attributes:
      run: as of `run_steps`.
      slots: of the caches.
    """

    case: Case
    target: Model
    head: Model | None
    spec: DecodeSpec
    run: Callable
    chance: jax.Array
    num_steps: int
    slots: int

    def draft_params(self) -> Params | None:
        return self.head and filled(self.head.params, jax.random.key(0))

    def params_and_state(self, routing: str) -> tuple[Params, DecodeState]:
        """Random parameters of the target, and the state after a prompt.

        Args:
          routing: "even" or "alike".
        """
        key = jax.random.key(0)
        params = filled(self.target.params, key, alike=routing == "alike")
        return params, initial_state(self.spec, self.target, self.case.batch, self.slots, key)


def program(case: Case, tiny: bool) -> Program:
    """The program that `measure` and the profiler run."""
    target, head = models(case, tiny)
    num_steps = 3 if tiny else STEPS
    slots = CONTEXT + (num_steps + 1) * (case.k + 1) + 8
    drafter = head and METHODS[case.method](head.graph, head.config, case.k)
    spec = DecodeSpec(target.graph, target.config, drafter, sample_drafts=False)
    chance = chances(case.method, case.k) if head else jnp.zeros(0)
    run = run_steps(spec, chance, num_steps)
    return Program(case, target, head, spec, run, chance, num_steps, slots)


def measure(case: Case, ceilings: dict, tiny: bool) -> Iterator[dict]:
    """A row a routing."""
    it = program(case, tiny)
    # few draws were drawn: speeds are at the rates, not at the luck of these draws
    acceptance_length = 1 + float(jnp.cumprod(it.chance).sum())
    draft_params = it.draft_params()
    compiled, in_graphs = None, {}
    for routing in ("even", "alike"):
        params, state = it.params_and_state(routing)
        if compiled is None:
            compiled, in_graphs = compile_here(it.run.lower(params, draft_params, state))
        run_once = functools.partial(compiled, params, draft_params, state)
        seconds = median_seconds(run_once, 1 if tiny else 3) / it.num_steps
        emitted = float(run_once().sum()) / it.num_steps
        num_experts = step_bytes.experts_read(it.target, params, state)
        num_bytes = step_bytes.floor_bytes(case, it.target, it.head, num_experts)
        floor = num_bytes / ceilings["copy_bytes_per_s"]
        yield {
            "part": "steps",
            "case": case.name,
            **dataclasses.asdict(case),
            "routing": routing,
            "step_us": 1e6 * seconds,
            "tokens_a_step": acceptance_length,
            "tokens_drawn": emitted / case.batch,
            "tokens_per_s": case.batch * acceptance_length / seconds,
            "synthetic_acceptance": True,
            "floor_us": 1e6 * floor,
            "of_floor": floor / seconds,
            "experts_read": num_experts,
            **in_graphs,
        }
        del params, state, run_once  # before the next ones take their memory


def compile_here(lowered: jax.stages.Lowered) -> tuple[Callable, dict]:
    """The compiled program, with its loop in a CUDA graph, and what of it graphs hold.

    On a CPU, which has no graphs, the second is empty. It has an error where XLA or a driver does
    not take loops in graphs; the program then has XLA's default graphs.
    """
    if jax.default_backend() != "gpu":
        return lowered.compile(), {}
    error = None
    try:
        compiled, listed = thunks.compile_program(lowered, OPTIONS)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"[:500]
        compiled, listed = thunks.compile_program(lowered)
    return compiled, {
        "thunks": len(listed),
        "thunks_in_graphs": sum(thunk.graph is not None for thunk in listed),
        "graphs": len({thunk.graph for thunk in listed} - {None}),
        "loop_in_graph_error": error,
    }


def drafting(ceilings: dict, tiny: bool, ks: Sequence[int]) -> Iterator[dict]:
    """One draft of K tokens by the head alone, batch 1: what more tokens cost each method.

    Args:
      ks: values of K, of which the first is 1.
    """
    for method in ("peagle", "eagle3"):
        _, head = models(Case(QWEN, method, 1, 1, 6), tiny)
        head = dataclasses.replace(head, params=filled(head.params, jax.random.key(0)))
        weights = (x for path, x in flatten_params(head.params) if not path.startswith("embed"))
        weight_bytes = sum(x.nbytes for x in weights)
        seconds = {}
        for k in ks:
            drafter = METHODS[method](head.graph, head.config, k)
            sizes = dict(context=64, repeats=1, steps=1) if tiny else dict(context=CONTEXT)
            seconds[k] = drafting_seconds(head, drafter, batch=1, **sizes)
        floor = {"K=1": 1e6 * weight_bytes / ceilings["copy_bytes_per_s"]}
        times = {f"K={k}": 1e6 * s for k, s in seconds.items()}
        ratios = {f"K={k}": s / seconds[1] for k, s in seconds.items()}
        yield {
            "part": "drafting",
            "shape": f"{method}, batch 1",
            "us": times,
            "floor_us": floor,
            "times_K=1": ratios,
        }
