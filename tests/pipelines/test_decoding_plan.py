"""`peagle plan`: its counts against counts by hand and by XLA, its steps against arithmetic."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.cli import main, plan_options
from peagle_jax.draft import head as draft_head
from peagle_jax.kernels import attention
from peagle_jax.layers import CachedAttention
from peagle_jax.pipelines import decoding_plan
from peagle_jax.pipelines.decoding_plan import (
    Models,
    best_choices,
    best_speedup,
    concurrencies_that_pay,
    plan_row,
    plan_step,
    sensitivity,
)
from peagle_jax.pipelines.devices import DEVICES, THIS_MACHINE, Device, find_device
from peagle_jax.pipelines.model_costs import (
    CachedLayers,
    Experts,
    ModelCosts,
    expected_experts,
    forward_work,
    model_costs,
)
from peagle_jax.pipelines.plan_models import (
    cache_sizes,
    default_head,
    head_costs,
    planned_heads,
    planned_target,
)
from peagle_jax.targets import config as targets_config
from peagle_jax.types import InputError

ROOT = Path(__file__).parents[2]
TARGETS, ASSETS = ROOT / "configs/targets", ROOT / "peagle_jax/assets"
PACKAGED = ASSETS / "target"

# A model of round numbers: 1 MB a forward, 0.5 MB of output, 0.25 MB of fusion.
ROUND = ModelCosts(
    layers=10,
    weight_bytes=2e6,
    dense_bytes=1e6,
    dense_numbers=1e6,
    fusion_bytes=0.25e6,
    fusion_numbers=0.25e6,
    output_bytes=0.5e6,
    output_numbers=0.5e6,
    row_bytes=100.0,
    experts=None,
    caches=(CachedLayers(None, 1000.0, 50.0), CachedLayers(8, 3000.0, 70.0)),
    number_bytes=2,
)
DEVICE = Device(
    name="round",
    memory=3e6,
    bandwidth=1e9,
    rates={4: 1e10, 2: 2e10, 1: 4e10},
    layer_seconds=1e-5,
    pass_seconds=1e-4,
    source="made up",
)


LAYERS = 4  # of published targets here; the whole of them takes seconds


@pytest.fixture
def cut(tmp_path):
    """(name, dtype, ...) -> a published target with its first layers only."""

    def make(name, dtype="auto", kv="auto", layers=LAYERS):
        raw = json.loads((TARGETS / f"{name}.json").read_text())
        for part in (raw, raw.get("text_config", {})):
            if "num_hidden_layers" in part:
                part["num_hidden_layers"] = layers
            if "layer_types" in part:
                part["layer_types"] = part["layer_types"][:layers]
            if "num_kv_shared_layers" in part:
                part["num_kv_shared_layers"] = min(part["num_kv_shared_layers"], layers // 3)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(raw))
        return planned_target(path, dtype, kv)

    return make


# ---------------------------------------------------------------- counts


def test_counts_of_qwen3_coder_by_hand(cut):
    costs = cut("qwen3-coder-30b-a3b-instruct", "bfloat16").costs
    q, kv, o, router = 2048 * 4096, 2 * 2048 * 512, 4096 * 2048, 2048 * 128
    norms = 2 * 2048 + 2 * 128
    assert costs.dense_numbers == LAYERS * (q + kv + o + router)
    assert costs.dense_bytes == 2 * (LAYERS * (q + kv + o + router + norms) + 2048)
    expert = 3 * 2048 * 768
    assert costs.experts == Experts(128, 8, LAYERS * 2 * expert, LAYERS * expert)
    assert costs.output_numbers == 2048 * 151936 and costs.output_bytes == 2 * 2048 * 151936
    assert costs.row_bytes == 2 * 2048
    # 4 KV heads of 128 in bfloat16, keys and values; 32 query heads
    assert costs.caches == (CachedLayers(None, LAYERS * 2 * 4 * 128 * 2, LAYERS * 4 * 32 * 128),)
    # 30.5 billion numbers in 48 layers
    layers = costs.dense_bytes + 128 * costs.experts.bytes_each
    whole = layers * 48 / LAYERS + 2 * costs.output_bytes
    assert whole == pytest.approx(2 * 30.53e9, rel=1e-3)
    assert costs.weight_bytes == layers + 2 * costs.output_bytes


def test_counts_of_gpt_oss_by_hand(cut):
    costs = cut("gpt-oss-20b").costs
    # MXFP4: 32 numbers in 16 bytes and a scale; biases in bfloat16
    gate_up, down = 5760 * 90 * 17 + 2 * 5760, 2880 * 90 * 17 + 2 * 2880
    experts = costs.experts
    assert (experts.count, experts.per_token) == (32, 4)
    assert experts.bytes_each == LAYERS * (gate_up + down)
    assert experts.numbers_each == LAYERS * 3 * 2880 * 2880
    assert costs.number_bytes == 2  # what is decoded is multiplied in bfloat16
    token = LAYERS // 2 * 2 * 8 * 64 * 2
    pair = LAYERS // 2 * 4 * 64 * 64
    assert set(costs.caches) == {CachedLayers(128, token, pair), CachedLayers(None, token, pair)}


def test_counts_of_gemma_4_by_hand(cut):
    """A tied output matrix, per-layer embeddings, and layers that share keys and values."""
    target = cut("gemma-4-e2b", "bfloat16", layers=15)
    costs = target.costs
    assert costs.output_bytes == 2 * 262144 * 1536
    assert costs.row_bytes == 2 * (1536 + 15 * 256)
    sliding = sum(window == 512 for window in target.config.windows)
    assert sliding == 12  # of five layers four
    assert sum(len(shape.layers) for shape in target.config.cache_shapes()) == 10  # five share
    by_window = {group.window: group for group in costs.caches}
    assert by_window[512].token_bytes == sliding * 2 * 1 * 256 * 2
    assert by_window[None].token_bytes == 3 * 2 * 1 * 512 * 2


def test_fp8_halves_matrices_and_caches(cut):
    full = cut("qwen3-8b", "bfloat16").costs
    half = cut("qwen3-8b", "fp8", "fp8").costs
    assert half.number_bytes == 1
    assert half.dense_bytes == pytest.approx(full.dense_bytes / 2, rel=0.01)
    assert half.output_bytes == full.output_bytes  # it stays as it is
    # a float32 scale beside every vector of 128
    assert half.caches[0].token_bytes == full.caches[0].token_bytes * (128 + 4) / 256


def test_counts_of_a_head_by_hand(cut):
    target = cut("llama-3.1-8b-instruct", layers=8)
    config = dataclasses.replace(default_head(target.config, "eagle3", 1), draft_vocab=32000)
    costs = head_costs(config)
    # queries, keys and values of layer 0 read embedding and hidden state
    attention = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096
    assert costs.dense_numbers == attention + 3 * 4096 * 14336
    assert costs.fusion_numbers == 3 * 4096 * 4096
    assert costs.output_numbers == 4096 * 32000
    # in FP8 a head would be half as large; heads are bfloat16
    assert costs.fusion_bytes == 2 * costs.fusion_numbers


def test_products_and_bytes_against_xla(monkeypatch):
    """XLA counts the products of a compiled forward itself; what it reads is in its arguments."""
    monkeypatch.setattr(attention, "is_native", lambda *args: False)  # XLA counts no call of ours
    target = tiny.target(vocab=600, dim=128, mlp_dim=384, head_dim=32)
    costs = model_costs(target, target, jnp.float32)
    rows, context = 64, 64
    cache = target.config.empty_cache(1, context)

    def forward(params):
        module = target.bind(params)
        tokens, positions = jnp.zeros((1, rows), jnp.int32), jnp.arange(rows)[None]
        out, _ = module(tokens, positions, CachedAttention(positions), cache)
        return module.compute_logits(out.hidden)

    compiled = jax.jit(forward).lower(target.params).compile()
    flops = compiled.cost_analysis()["flops"]
    work = forward_work(costs, rows=rows, outputs=rows, sequences=1, context=context)
    # XLA also counts norms, activations, softmax and rotations
    assert work.flops == pytest.approx(flops, rel=0.1) and work.flops < flops
    embedding = 600 * 128 * 4
    parameters = sum(x.nbytes for x in jax.tree.leaves(target.params))
    assert work.bytes == parameters - embedding + rows * 128 * 4
    assert work.cache_bytes == sum(x.nbytes for group in cache.groups for x in (*group.k, *group.v))


@pytest.mark.parametrize(("count", "per_token", "rows"), [(128, 8, 8), (32, 4, 3), (16, 1, 40)])
def test_distinct_experts_against_draws(count, per_token, rows):
    rng = np.random.default_rng(count)
    draws = 1500
    chosen = np.argsort(rng.random((draws, rows, count)), axis=-1)[..., :per_token]
    distinct = np.mean([len(np.unique(draw)) for draw in chosen.reshape(draws, -1)])
    experts = Experts(count, per_token, 1.0, 1.0)
    assert expected_experts(experts, rows, "even") == pytest.approx(distinct, rel=0.01)
    assert expected_experts(experts, rows, "alike") == per_token
    assert expected_experts(experts, 1, "even") == pytest.approx(per_token)


# ---------------------------------------------------------------- steps


def test_forward_by_hand():
    experts = dataclasses.replace(ROUND, experts=Experts(4, 1, 1e5, 2e4))
    work = forward_work(
        experts, rows=3, outputs=2, sequences=5, context=20, fused=1, routing="alike"
    )
    assert work.bytes == 1e6 + 3 * 100 + 0.5e6 + 0.25e6 + 1e5
    assert work.cache_bytes == 5 * (20 * 1000 + 8 * 3000)
    products = 3 * 1e6 + 2 * 0.5e6 + 0.25e6 + 3 * 1 * 2e4
    assert work.flops == 2 * products + 3 * (20 * 50 + 8 * 70)


@pytest.mark.parametrize("overlaps", [True, False])
def test_steps_by_hand(overlaps):
    """K = 2, two sequences of 4 tokens, 1.5 tokens a step."""
    device = dataclasses.replace(DEVICE, overlaps=overlaps, cache_bandwidth=0.5e9)
    head = dataclasses.replace(ROUND, layers=1)
    merge = max if overlaps else sum

    def forward(rows, outputs, fused=0):
        read = (1e6 + rows * 100 + 0.5e6 + 0.25e6 * (fused > 0)) / 1e9
        read += 2 * 4 * (1000 + 3000) / 0.5e9
        flops = 2 * (rows * 1e6 + outputs * 0.5e6 + fused * 0.25e6) + rows * 4 * (50 + 70)
        return merge((read, flops / 2e10))

    common = dict(length=1.5, concurrency=2, context=4)
    plain = plan_step(ROUND, None, device, method="none", k=0, **{**common, "length": 1.0})
    assert plain.step_seconds == pytest.approx(forward(2, 2) + 10e-5)
    assert plain.tokens_per_second == pytest.approx(2 / plain.step_seconds)

    verify = forward(6, 6) + 10e-5
    parallel = plan_step(ROUND, head, device, method="peagle", k=2, **common)
    # 1.5 committed tokens and a placeholder of each sequence; two logits of each
    draft = forward(5, 4, fused=5) + 1e-5
    assert parallel.step_seconds == pytest.approx(verify + draft + 2e-4)
    assert parallel.tokens_per_second == pytest.approx(3 / parallel.step_seconds)

    one_by_one = plan_step(ROUND, head, device, method="eagle3", k=2, **common)
    draft = forward(3, 2, fused=3) + forward(2, 2) + 2e-5
    assert one_by_one.step_seconds == pytest.approx(verify + draft + 3e-4)


def test_what_binds_a_step():
    def bound(**changes):
        device = dataclasses.replace(DEVICE, **changes)
        step = plan_step(
            ROUND, None, device, method="none", k=0, length=1.0, concurrency=1, context=1
        )
        return step.bound_by

    assert bound() == "bytes"
    assert bound(layer_seconds=1.0) == "launches"
    assert bound(rates={2: 1e3}) == "arithmetic"


def models(rates, **changes):
    heads = {"peagle": dataclasses.replace(ROUND, layers=1, dense_bytes=1e5, dense_numbers=1e5)}
    return Models(target=ROUND, heads=heads, rates={"peagle": rates}, **changes)


def test_best_k_and_where_it_pays():
    memory_bound = dataclasses.replace(DEVICE, rates={2: 1e13})
    plain, best, choices = best_choices(models((1.0,) * 6), memory_bound, 1, 4)
    assert best["peagle"].k == 6 and len(choices["peagle"]) == 6
    assert best["peagle"].acceptance_length == 7
    assert best["peagle"].tokens_per_second > plain.tokens_per_second
    # drafts that nobody accepts only cost
    assert best_speedup(models((0.0,) * 3), memory_bound, 1, 4) < 1
    assert concurrencies_that_pay(models((0.0,)), memory_bound, "peagle", 4) == []
    assert concurrencies_that_pay(models((1.0,)), memory_bound, "peagle", 4) == [(1, 1024)]
    # where products decide from some number of rows on, drafts that are rejected cost as others do
    ends = concurrencies_that_pay(models((0.5, 0.4)), DEVICE, "peagle", 4)
    [(first, last)] = ends
    assert first == 1 and 1 < last < 1024
    assert best_speedup(models((0.5, 0.4)), DEVICE, last, 4) > 1
    assert best_speedup(models((0.5, 0.4)), DEVICE, 2 * last, 4) <= 1


def test_two_ranges_with_experts():
    """Few rows read more experts with every draft; many rows read all of them anyway."""
    experts = dataclasses.replace(
        ROUND, dense_bytes=1e4, dense_numbers=1e4, experts=Experts(64, 1, 1e6, 1e3)
    )
    mixture = dataclasses.replace(models((0.62,)), target=experts)
    fast = dataclasses.replace(DEVICE, rates={2: 1e15}, layer_seconds=0.0, pass_seconds=0.0)
    ranges = concurrencies_that_pay(mixture, fast, "peagle", 4)
    assert ranges[-1][1] == 1024 and ranges[0][0] > 1
    alike = dataclasses.replace(mixture, routing="alike")
    assert concurrencies_that_pay(alike, fast, "peagle", 4)[0][0] == 1


def test_sensitivity():
    effects = sensitivity(models((0.7, 0.5)), DEVICE, 1, 4)
    assert effects["acceptance"] > 0
    sizes = [abs(effect) for effect in effects.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert effects["cost of passes"] < 0
    now = best_speedup(models((0.7, 0.5)), DEVICE, 1, 4)
    faster = dataclasses.replace(DEVICE, bandwidth=1.2e9)
    assert effects["bandwidth"] == best_speedup(models((0.7, 0.5)), faster, 1, 4) / now - 1
    floor = dataclasses.replace(DEVICE, layer_seconds=None)
    assert "cost of layers" not in sensitivity(models((0.7,)), floor, 1, 4)
    # a share cannot exceed 1
    assert sensitivity(models((1.0,)), DEVICE, 1, 4)["acceptance"] == 0


def test_caches_on_this_machine(cut, tmp_path, monkeypatch):
    """What engines take here, in the place of the weights' dtype."""
    cut("gpt-oss-20b")
    path = tmp_path / "gpt-oss-20b.json"
    for dtype in (jnp.float32, jnp.bfloat16):
        for module in (targets_config, draft_head):
            monkeypatch.setattr(module, "default_cache_dtype", lambda *_, d=dtype: jnp.dtype(d))
        here = planned_target(path, "auto", "auto", on_cpu=True)
        assert here.cache_dtype == dtype
        assert planned_target(path, "auto", "auto").cache_dtype == jnp.bfloat16
        heads = planned_heads(here, 4, [])
        bytes_each = jnp.dtype(dtype).itemsize
        of_head = 4 * 2 * 8 * 64
        size = cache_sizes(here, heads, on_cpu=True)(3, 100)
        assert size == 3 * 100 * (LAYERS * 2 * 8 * 64 + of_head) * bytes_each
        costs = head_costs(heads["peagle"], on_cpu=True)
        assert sum(layer.token_bytes for layer in costs.caches) == of_head * bytes_each


def test_memory(cut):
    target = cut("gpt-oss-20b")
    heads = planned_heads(target, 4, [])
    size = cache_sizes(target, heads)(3, 1000)
    # every second layer slides, and keeps 128 tokens
    of_target = 3 * (1000 + 128) * LAYERS // 2 * 2 * 8 * 64 * 2
    assert size == of_target + 3 * 1000 * 4 * 2 * 8 * 64 * 2  # the larger head has four layers
    row = plan_row(models((0.5,)), DEVICE, 1, 4, 1e6)
    assert row.memory == 2e6 + 2e6 + 1e6 and not row.fits
    for memory, fits in ((5e6, True), (None, None)):
        device = dataclasses.replace(DEVICE, memory=memory)
        assert plan_row(models((0.5,)), device, 1, 4, 1e6).fits is fits


def test_devices():
    h200 = DEVICES["h200"]
    assert h200.bandwidth == pytest.approx(4.3e12) and h200.rates[2] == pytest.approx(790e12)
    assert DEVICES["v6e"].is_floor and not h200.is_floor
    assert plan_options.DEVICE_NAMES == (*DEVICES, THIS_MACHINE)
    with pytest.raises(InputError, match="h100, h200, b200, rtx-pro-6000, v5p, v6e, this-machine"):
        find_device("a100")


@pytest.mark.slow
def test_this_machine_is_measured():
    device = find_device("this-machine")
    assert 1e8 < device.bandwidth < 1e13 and device.cache_bandwidth <= device.bandwidth
    assert device.layer_seconds >= 0 and device.memory > 1e8
    assert device.rates[4] > 1e9 and device.overlaps == (jax.default_backend() != "cpu")


# ---------------------------------------------------------------- the command


def plan(*arguments):
    return main(["plan", *map(str, arguments)])


def test_command(tmp_path, capsys):
    out = tmp_path / "plan"
    code = plan(
        *("--target", PACKAGED, "--device", "h200", "--drafter", ASSETS / "peagle"),
        *("--concurrency", "1,8", "--context", "1k,2048", "--head-layers", 2),
        *("--acceptance", "peagle=90,80,70", "--out", out),
    )
    printed = capsys.readouterr().out
    assert code == 0 and "NVIDIA H200" in printed and "90 80 70 %; given" in printed
    rows = [json.loads(line) for line in (out / "plan.jsonl").read_text().splitlines()]
    assert [(row["context"], row["concurrency"]) for row in rows] == [
        (1024, 1),
        (1024, 8),
        (2048, 1),
        (2048, 8),
    ]
    first = rows[0]
    assert first["best"]["peagle"]["acceptance_length"] <= 1 + 0.9 + 0.8 + 0.7
    assert {choice["k"] for choice in first["choices"]["eagle3"]} == set(range(1, 9))
    speed = f"{first['plain']['tokens_per_second']:,.0f}"
    assert speed in printed
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_floors_are_called_so(capsys):
    assert plan("--target", PACKAGED, "--device", "v5p", "--context", "1k") == 0
    assert "floors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "a100"), "h100, h200"),
        (("--concurrency", "0"), "--concurrency"),
        (("--context", "1m"), "numbers of tokens"),
        (("--context", "1000k"), "longest sequence; got 1024000; give --context 1024"),
        (("--head-layers", "0"), "--head-layers"),
        (("--heads", "0"), "--head-layers"),
        (("--acceptance", "peagle=10,20"), "must not rise"),
        (("--dtype", "mxfp4"), "GPT-OSS"),
        (("--target", ROOT / "configs/draft/qwen3_coder_30b.json"), "a draft head's"),
        (("--drafter", PACKAGED), "must be a draft head's folder"),
        (("--drafter", ASSETS / "peagle", "--drafter", ASSETS / "peagle"), "one P-EAGLE"),
        (("--out", ROOT / "README.md"), "writable"),
    ],
)
def test_mistakes(arguments, words, capsys):
    base = ("--target", PACKAGED, "--context", "1k")
    assert plan(*base, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and words in lines[0]


def test_heads_of_other_targets(cut):
    with pytest.raises(InputError, match="must be a head of a target 4096 wide"):
        planned_heads(cut("llama-3.1-8b-instruct"), 4, [str(ASSETS / "peagle")])


def test_no_config(tmp_path, capsys):
    path = tmp_path / "config.json"
    for content in ("{", '{"model_type": "bert"}'):
        path.write_text(content)
        assert plan("--target", tmp_path) == 2
    assert "model_type must be one of" in capsys.readouterr().err


def test_largest_concurrency_is_a_power_of_two():
    """The search doubles, and its last step must be the bound that is printed."""
    assert decoding_plan.MAX_CONCURRENCY & (decoding_plan.MAX_CONCURRENCY - 1) == 0
