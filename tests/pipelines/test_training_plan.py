"""`peagle train --dry-run`: its bytes and products against XLA's own counts; published recipes."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax.cli import main
from peagle_jax.kernels import packed_attention
from peagle_jax.pipelines import training_plan
from peagle_jax.train import train_head
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.config import (
    Eagle3Run,
    EagleRun,
    HeadShape,
    PeagleRun,
    TttConfig,
    load_run,
)
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.hidden_states import shifted
from peagle_jax.train.recipe_sections import (
    ComputeConfig,
    DataConfig,
    MeshConfig,
    PlaceholderConfig,
)
from peagle_jax.train.update import make_optimizer
from peagle_jax.types import Batch, InputError

ROOT = Path(__file__).parents[2]
RECIPES = ("gemma4_31b", "gpt_oss_120b", "gpt_oss_20b", "qwen3_coder_30b")
RUN = PeagleRun(
    target="folder",
    out="runs/x",
    head=HeadShape(layers=3),
    data=DataConfig(source="answers.jsonl", seq_len=513, batch_size=1),
    cod=CodConfig(num_depths=6),
    train_lm_head=True,
)


def small_models():
    target = tiny.target(vocab=600, dim=128, mlp_dim=384)
    head = tiny.head(
        vocab=600,
        draft_vocab=600,
        dim=128,
        mlp_dim=768,
        target_dim=128,
        layers=3,
        windows=(None,) * 3,
    )
    return target, head


@pytest.mark.parametrize("partitions", [1, 5])
def test_activations_and_products(partitions):
    """Within a factor that is stated: XLA reuses buffers as it likes."""
    target, head = small_models()
    run = dataclasses.replace(RUN, cod=dataclasses.replace(RUN.cod, partitions=partitions))
    plan = training_plan.plan_of(run, target, head)
    T = run.data.seq_len
    batch = Batch(np.ones((1, T), np.int32), np.zeros((1, T), np.int32), np.ones((1, T), bool))
    segment_ids, loss_mask = shifted(batch)
    cod = cod_sample(loss_mask, segment_ids, run.cod, [0, 0])
    ids = np.zeros((1, 2), np.int32)
    given = HeadBatch(batch, None, segment_ids, loss_mask, cod, ids, run.num_depths)
    trained, frozen = train_head.split_params(run, head)

    # as a list of arrays: the classes of a batch check the axes of their fields
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, given))

    def loss(params, leaves, target_params):
        given = jax.tree.unflatten(structure, leaves)
        return train_head.head_loss(run, target, head, params, given, (target_params, frozen))[0]

    arguments = trained, leaves, target.params
    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    planned = plan.activation_bytes + plan.gradient_bytes - plan.head_bytes  # the result is no temp
    print(temporary, planned)
    assert 0.5 < planned / temporary < 2
    if partitions == 1:  # XLA counts the body of a loop once
        flops = compiled.cost_analysis()["flops"]
        print(flops, plan.step_flops)
        assert 0.7 < plan.step_flops / flops < 1.2


def test_placeholders_that_are_the_same_are_counted_once():
    """A product of 256 x (4 + 2 * 2) * 10 for each of them that layer 0 need not multiply."""
    target, head = small_models()

    def flops(run, head=head):
        return training_plan.plan_of(run, target, head).step_flops

    def with_placeholder(**changes):
        return dataclasses.replace(RUN, placeholder=PlaceholderConfig(**changes))

    n = RUN.data.seq_len - 1
    packed, _ = training_plan.element_counts(RUN, n)
    saved = 6.0 * (packed - n - (RUN.num_depths - 1)) * 256 * (4 + 2 * 2) * 10
    assert 0.01 * flops(RUN) < saved
    assert flops(with_placeholder(true_tokens=0.5)) - flops(RUN) == pytest.approx(saved)
    again = dataclasses.replace(RUN, compute=ComputeConfig(recompute="layers"))
    whole = with_placeholder(true_tokens=0.5)
    whole = dataclasses.replace(whole, compute=again.compute)
    assert flops(whole) - flops(again) == pytest.approx(saved * 8 / 6)


def test_the_baselines_have_plans_of_their_own(tmp_path):
    """EAGLE-1 reads one hidden state and trains one step, EAGLE-3 is unrolled."""
    target = ROOT / "peagle_jax/assets/target"
    config = json.loads((target / "config.json").read_text())
    D, V = config["hidden_size"], config["vocab_size"]
    common = {"target": str(target), "out": "runs/x", "data": RUN.data}
    eagle = EagleRun(**common, head=HeadShape(layers=1))
    eagle3 = Eagle3Run(**common, head=HeadShape(layers=1), ttt=TttConfig(steps=3))
    plans = {run.task: training_plan.training_plan(run) for run in (eagle, eagle3)}
    n = RUN.data.seq_len - 1
    assert training_plan.element_counts(eagle, n) == (n, n)
    assert training_plan.element_counts(eagle3, n) == (3 * n, 3 * n)
    # fc of 3 D x D and attention of double width, beside fc of 2 D x D
    assert plans["eagle3"].head_bytes - plans["eagle"].head_bytes >= 4 * D * D
    assert plans["eagle"].head_bytes > 4 * (2 * D * V + 2 * D * D)
    # three steps of the head for one, beside the same forward of the target
    assert plans["eagle3"].step_flops > 1.7 * plans["eagle"].step_flops


def test_bytes_of_parameters_are_exact():
    target, head = small_models()
    plan = training_plan.plan_of(RUN, target, head)
    state = make_optimizer(RUN.optimizer).init(head.params)

    def num_bytes(tree) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    assert plan.target_bytes == num_bytes(target.params)
    assert plan.head_bytes == num_bytes(head.params)
    assert plan.optimizer_bytes == pytest.approx(num_bytes(state), abs=100)
    assert plan.packed_length == 512 + RUN.cod.capacity(512) == plan.elements_at_once
    divided = training_plan.plan_of(
        dataclasses.replace(RUN, mesh=MeshConfig(model=2)), target, head
    )
    assert 0.5 < divided.head_bytes / plan.head_bytes < 0.6  # norms and the fusion are whole


def test_bidirectional_placeholders_have_scores_in_memory():
    """No kernel computes their attention on a GPU."""
    target, head = small_models()
    run = dataclasses.replace(
        RUN, compute=ComputeConfig(dtype="bfloat16"), target_dtype="bfloat16", cod=CodConfig()
    )
    config = dataclasses.replace(head.config, placeholder_attention="bidirectional")
    other = dataclasses.replace(head, config=config)
    causal, bidirectional = (
        training_plan._scores(run, 1, 512, model.config) for model in (head, other)
    )
    assert causal == 0
    assert bidirectional == packed_attention.MAX_SCORES * 4 * training_plan.SCORE_COPIES
    # blocks of 1,024 keys, and of fewer queries the more sequences and heads there are
    for rows, queries in ((512 // config.heads, 64), (16 // config.heads, 512)):
        some = training_plan._scores(run, rows, 2048, config)
        at_once = rows * config.heads * queries * 1024
        assert some == at_once * 4 * training_plan.SCORE_COPIES


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipes_fit_eight_devices(name):
    """As written, on H200s; and the comment in the file says so, with the bytes."""
    path = ROOT / f"configs/train/{name}.yaml"
    run = load_run(path)
    plan = training_plan.training_plan(run, None, ROOT / "configs/targets")
    assert plan.devices == 8 and plan.total_bytes < 0.9 * training_plan.H200_BYTES
    assert f"# {plan.total_bytes / 1e9:.0f} GB on each of 8 H200s" in path.read_text()
    alone = training_plan.training_plan(run, 1, ROOT / "configs/targets").total_bytes
    on_one = f"8 H200s; {alone / 1e9:.0f} on one"
    fits = "" if alone <= training_plan.H200_BYTES else ", which has 141"
    assert f"{on_one}{fits}\n" in path.read_text()
    # one row of 20,000 tokens at a time, too, for every one of them
    long = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=20_000))
    plan = training_plan.training_plan(long, None, ROOT / "configs/targets")
    assert plan.total_bytes < training_plan.H200_BYTES
    # without partitions, rounding and recomputation, 8 rows at once, they would not
    whole = dataclasses.replace(
        run,
        cod=dataclasses.replace(run.cod, partitions=1),
        compute=ComputeConfig(),
        mesh=MeshConfig(),
        gradient_accumulation=1,
    )
    plan = training_plan.training_plan(whole, None, ROOT / "configs/targets")
    assert plan.total_bytes > training_plan.H200_BYTES


def test_other_numbers_of_devices():
    run = load_run(ROOT / "configs/train/gpt_oss_20b.yaml")
    for devices, mesh, parts in ((1, (1, 1, 1), 8), (2, (2, 1, 1), 4), (8, (8, 1, 1), 1)):
        moved = training_plan.on_devices(run, devices)
        assert dataclasses.astuple(moved.mesh) == mesh and moved.gradient_accumulation == parts
    with pytest.raises(InputError, match="--devices: 8 rows, data.batch_size, must divide among"):
        training_plan.on_devices(run, 3)
    # as a recipe of init-config: all rows on one device, until there are more of these
    run = dataclasses.replace(run, mesh=MeshConfig(), gradient_accumulation=1)
    for devices, parts in ((2, 1), (8, 1), (4, 1)):
        moved = training_plan.on_devices(run, devices)
        assert moved.mesh == MeshConfig(data=devices) and moved.gradient_accumulation == parts
    with pytest.raises(InputError, match="--devices: 8 rows"):
        training_plan.on_devices(run, 16)


def test_command(tmp_path, monkeypatch, capsys):
    """It writes nothing, and reads no weights: the target of the recipe is not on this disk.

    From any folder: the published configurations belong to the package.
    """
    monkeypatch.chdir(tmp_path)
    out, recipes = tmp_path / "out", ROOT / "configs" / "train"
    words = ["train", str(recipes / "gpt_oss_20b.yaml"), "--out", str(out), "--dry-run"]
    assert main([*words, "--devices", "1"]) == 0
    printed = capsys.readouterr().out
    assert "8,192" in printed and "fits an H200" in printed and not out.exists()
    assert main([*words[:-1], "--devices", "1"]) == 2
    assert "--devices" in capsys.readouterr().err
    assert main(["train", str(recipes / "demo_target.yaml"), "--dry-run"]) == 2
    assert "needs the recipe of a head" in capsys.readouterr().err
    published = {path.name for path in (ROOT / "configs" / "targets").glob("*.json")}
    assert {path.name for path in training_plan.TARGET_CONFIGS.glob("*.json")} == published
    with pytest.raises(InputError, match="must be a folder with config.json, or a hub id that is"):
        training_plan.find_config("openai/nothing-20b", tmp_path)


def test_floor_of_a_step():
    """By hand: the larger of products at the rate of their dtype, and of bytes read."""
    target, head = small_models()
    plan = training_plan.plan_of(RUN, target, head)
    assert plan.step_floor == max(
        plan.step_flops / (67e12 * (790 / 989)),
        (plan.target_bytes + 3 * plan.head_bytes + 2 * plan.optimizer_bytes) / 4.3e12,
    )
    # the target in 16 bits, at their rate
    narrow = dataclasses.replace(RUN, target_dtype="bfloat16")
    of_target = training_plan.target_flops(RUN, target)
    of_head = plan.step_flops - of_target
    by_products = of_target / (989e12 * (790 / 989)) + of_head / (67e12 * (790 / 989))
    assert 0 < of_target < plan.step_flops
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training_plan, "H200", dataclasses.replace(training_plan.H200, bandwidth=1e99)
        )
        floor = training_plan.plan_of(narrow, target, head).step_floor
        assert math.isclose(floor, by_products)
        stored = dataclasses.replace(RUN, hidden_states_dir="x")
        floor = training_plan.plan_of(stored, target, head).step_floor
        assert math.isclose(floor, of_head / (67e12 * (790 / 989)))
        no_products = dict.fromkeys((4, 2, 1), 1e99)
        device = dataclasses.replace(training_plan.H200, bandwidth=1.0, rates=no_products)
        patch.setattr(training_plan, "H200", device)
        output = target.params["lm_head"]["kernel"]
        bytes_read = 4 * math.prod(output.shape) + 3 * plan.head_bytes + 2 * plan.optimizer_bytes
        assert training_plan.plan_of(stored, target, head).step_floor == bytes_read
    assert math.isclose(
        plan.total_bytes,
        sum(
            getattr(plan, f"{part}_bytes")
            for part in ("target", "head", "optimizer", "gradient", "activation")
        ),
    )
