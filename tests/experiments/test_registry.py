"""Every variant of every experiment, under every budget: what it is, what it shares, and that its loss can be formed."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import registry
from experiments.arithmetic import training_flops
from experiments.base import Experiment, Measured, Variant
from experiments.budgets import BUDGETS
from experiments.findings import NAME
from experiments.registry import EXPERIMENTS
from experiments.work import Job, as_eagle3, base, growth, with_depths
from peagle_jax.checkpoints import export_placeholders
from peagle_jax.pipelines import tracing
from peagle_jax.train import new_head, train_head
from peagle_jax.train.cod import CodConfig, cod_sample
from peagle_jax.train.config import DepthStage, PeagleRun
from peagle_jax.train.head_batches import HeadBatch
from peagle_jax.train.hidden_states import shifted
from peagle_jax.types import Batch

VARIANTS = [
    (experiment, name) for experiment in EXPERIMENTS.values() for name in experiment.variants
]
# what each experiment calls the base; the two curves over a size of the base call it otherwise under other budgets
BASE = {
    "hidden_designs": ["shared"],
    "token_designs": ["mask"],
    "regularisation": ["none"],
    "cod_sampling": ["r 0.8 floor 0.1"],
    "context_length": ["whole"],
    "embeddings": ["embedding trained"],
    "losses": ["forward_kl"],
    "taps": ["low + high + last"],
    "data_amount": ["greedy answers"],
    "warm_start": ["target's last layer"],
    "against_eagle3": ["P-EAGLE"],
    "sampling": ["0", "0.5", "1"],
}
BASE_OF = {
    "smoke": {**BASE, "head_layers": ["1"], "speculation_depth": ["K 3"]},
    "small": {**BASE, "head_layers": ["2"], "speculation_depth": ["K 5", "trained 5 drafts 8"]},
    "full": {**BASE, "head_layers": ["4"], "speculation_depth": ["K 8"]},
}
# the same head measured in the same way: EAGLE-3 has one layer, and so has the smoke budget's parallel head
EQUAL = {"smoke": [("EAGLE-3", "EAGLE-3 of equal parameters")], "small": [], "full": []}
# (experiment, budget) whose reference is not the base, and what is then said of it
REFERENCE_CHANGES = {
    ("head_layers", "smoke"): ["head.layers: 1 -> 2"],
    ("head_layers", "full"): ["head.layers: 4 -> 2"],
    ("speculation_depth", "full"): ["cod.depths: 8 -> 5"],
}


def jobs(budget: str, seed: int = 0) -> list[Job]:
    return [Job(experiment, name, seed, budget) for experiment, name in VARIANTS]


def test_every_question_is_in_the_registry_with_command_expectation_and_result():
    modules = [value for value in vars(registry).values() if hasattr(value, "EXPERIMENT")]
    assert len(modules) == len(EXPERIMENTS) == 14  # two of one name would be one
    for module in modules:
        e = module.EXPERIMENT
        assert module.__name__ == f"experiments.{e.name}" and NAME.fullmatch(e.name)
        assert e.question.endswith("?") and module.__doc__.startswith(e.question), e.name
        assert all(
            word in module.__doc__
            for word in (f"python -m experiments.run {e.name} ", "\nExpects: ", "\nResult: ")
        ), e.name
        assert e.expects and e.axis and e.paper and len(e.variants) > 2, e.name


def test_what_an_experiment_refuses():
    plain = EXPERIMENTS["sampling"]
    with pytest.raises(ValueError, match="sampling: the reference 2 must be one of 0, 0.5, 1"):
        dataclasses.replace(plain, reference="2")
    with pytest.raises(ValueError, match="every variant of a curve needs x"):
        Experiment(
            **{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
            | {"variants": {"0": Variant()}}
        )


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_run_is_valid_and_its_taps_are_stored(budget):
    for job in jobs(budget):
        run = job.plain_run()  # its dataclasses check themselves
        features, *prompts = job.stages()
        assert (
            set(run.head.aux_hidden_state_layers) <= set(features.config["taps"])
            and features.config["length"] == run.data.seq_len
        ), job.name
        assert (job.variant.method == "peagle") == isinstance(run, PeagleRun), job.name
        assert run.num_depths_at(0) <= run.num_depths == run.num_depths_at(run.optimizer.steps - 1)
        held = {m.prompt_tokens for m in job.measured()} | {job.budget.answers.prompt_tokens}
        assert {stage.config["tokens"] for stage in prompts} == held
        for m in job.measured():
            assert None not in (m.k, m.prompt_tokens, m.new_tokens)
            assert m.prompt_tokens + m.new_tokens + m.k < job.budget.model.context
        assert (
            run.data.seq_len <= job.budget.model.context
            and job.answers.count >= run.data.batch_size
        )


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_each_variant_changes(budget):
    for job in jobs(budget):
        unchanged = job.name in BASE_OF[budget][job.experiment.name]
        changes = [said for said in job.changes() if not said.startswith("decoding.")]
        assert (changes == []) == unchanged, (job.experiment.name, job.name, changes)
        if job.name == job.experiment.reference and not unchanged:
            assert (
                job.changes()[0]
                == REFERENCE_CHANGES.get((job.experiment.name, budget), ["cod.depths: 3 -> 5"])[0]
            ), job.changes()


def test_changes_in_words():
    def say(experiment, name):
        return Job(EXPERIMENTS[experiment], name, 3, "small").changes()

    assert say("hidden_designs", "gated") == ["placeholder.hidden: shared -> gated"]
    assert say("context_length", "half") == ["data.batch_size: 2 -> 4", "data.seq_len: 128 -> 64"]
    assert say("data_amount", "a sixteenth") == ["answers.count: 4096 -> 256"]
    assert say("data_amount", "sampled answers") == ["answers.temperatures: (0.0,) -> (1.0,)"]
    assert (
        say("sampling", "0.5") == ["decoding.temperature: 0.0 -> 0.5"]
        and say("sampling", "0") == []
    )
    assert say("speculation_depth", "trained 5 drafts 8") == ["decoding.k: 5 -> 8"]
    assert say("warm_start", "EAGLE-3 head") == ["start_from: the EAGLE-3 head itself"]
    assert {"task: peagle -> eagle3", "head.layers: 2 -> 1", "ttt.steps: None -> 5"} <= set(
        say("against_eagle3", "EAGLE-3")
    )


@pytest.mark.parametrize("budget", BUDGETS)
def test_who_shares_a_head_and_who_is_the_same_run(budget):
    by_head: dict[str, list[tuple[str, str]]] = {}
    by_run: dict[tuple, list[str]] = {}
    for job in jobs(budget):
        by_head.setdefault(job.head_key, []).append((job.experiment.name, job.name))
        by_run.setdefault((job.experiment.name, job.key), []).append(job.name)
    of_base = by_head.pop(Job(EXPERIMENTS["sampling"], "0", 0, budget).head_key)
    assert sorted(of_base) == sorted(
        (e, name) for e, names in BASE_OF[budget].items() for name in names
    )
    shared = {frozenset(names) for names in by_head.values() if len(names) > 1}
    eagle3 = [
        ("warm_start", "the EAGLE-3 head itself"),
        ("against_eagle3", "EAGLE-3 of equal parameters"),
    ]
    expected = {
        frozenset([*eagle3, ("against_eagle3", "EAGLE-3")] if budget == "smoke" else eagle3)
    }
    if budget != "small":
        expected.add(
            frozenset([("speculation_depth", "K 5"), ("speculation_depth", "trained 5 drafts 8")])
        )
    assert shared == expected
    assert [tuple(names) for names in by_run.values() if len(names) > 1] == EQUAL[budget]


def test_seeds_and_budgets_are_different_runs_of_the_same_text():
    base_runs = (
        Job(EXPERIMENTS["sampling"], "0", 0, "small"),
        Job(EXPERIMENTS["sampling"], "0", 1, "small"),
    )
    assert (
        base_runs[0].head_key != base_runs[1].head_key
        and base_runs[0].stages()[0].key == base_runs[1].stages()[0].key
    )
    assert all(Job(e, name, 0, "small").key != Job(e, name, 1, "small").key for e, name in VARIANTS)
    keys = {
        budget: {job.key for job in jobs(budget)} | {job.head_key for job in jobs(budget)}
        for budget in BUDGETS
    }
    assert (
        not keys["smoke"] & keys["small"]
        and not keys["small"] & keys["full"]
        and not keys["smoke"] & keys["full"]
    )


def test_a_warm_start_is_of_a_head_that_is_trained_on_the_same_features():
    for budget in BUDGETS:
        warm = [job for job in jobs(budget) if job.warm()]
        assert [(job.experiment.name, job.name) for job in warm] == [("warm_start", "EAGLE-3 head")]
        for job in warm:
            before = job.warm()
            assert (
                before.stages()[0].key == job.stages()[0].key
                and before.seed == job.seed
                and before.warm() is None
            )
            assert (
                before.plain_run().head == job.plain_run().head and before.head_key != job.head_key
            )
            assert (
                job.head_key != Job(EXPERIMENTS["sampling"], "0", 0, budget).head_key
            )  # though its run is the base's


def test_a_run_is_the_plain_run_with_folders(tmp_path):
    job = Job(EXPERIMENTS["warm_start"], "EAGLE-3 head", 0, "smoke")
    run, plain = job.run(tmp_path), job.plain_run()
    assert run.init_from == str(job.warm().head_folder(tmp_path)) and run.out == str(
        job.head_folder(tmp_path)
    )
    emptied = dataclasses.replace(
        run,
        target="",
        features="",
        out="",
        init_from=None,
        data=dataclasses.replace(run.data, source=""),
    )
    assert emptied == plain and not any(
        value == "" for value in (run.target, run.hidden_states_dir, run.out, run.data.source)
    )


# ---------------------------------------------------------------- depths


@pytest.mark.parametrize(
    ("steps", "depths", "wanted"),
    [
        (3000, 5, [(600, 1), (1200, 2), (1800, 3)]),
        (3000, 8, [(600, 1), (1200, 2), (1800, 3)]),
        (3000, 3, [(600, 1), (1200, 2)]),
        (3000, 2, [(600, 1)]),
        (3000, 1, []),
        (16, 3, [(3, 1), (6, 2)]),
        (17, 4, [(3, 1), (6, 2), (10, 3)]),
    ],
)
def test_growth(steps, num_depths, wanted):
    assert growth(steps, num_depths) == tuple(
        DepthStage(until=until, num_depths=d) for until, d in wanted
    )


@pytest.mark.parametrize("depths", [1, 2, 3, 8])
def test_with_depths(num_depths):
    usual = base(BUDGETS["small"], 7)
    run = with_depths(usual, num_depths)
    assert (
        run.num_depths == num_depths
        and run.depth_schedule == growth(usual.optimizer.steps, num_depths)
        and run.cod.down_sample_ratio == usual.cod.down_sample_ratio
    )
    assert dataclasses.replace(run, cod=usual.cod, depth_schedule=usual.depth_schedule) == usual
    eagle3 = as_eagle3(run, layers=3)
    assert (
        eagle3.num_depths == num_depths
        and eagle3.depth_schedule == run.depth_schedule
        and eagle3.head == dataclasses.replace(run.head, layers=3)
    )
    assert (eagle3.seed, eagle3.data, eagle3.optimizer, eagle3.loss) == (
        run.seed,
        run.data,
        run.optimizer,
        run.loss,
    )


def test_measured_takes_from_the_budget_what_it_does_not_say():
    budget = BUDGETS["smoke"]
    assert Measured().filled(budget) == Measured(
        k=3, temperature=0.0, prompt_tokens=16, new_tokens=16
    )
    assert Measured(k=1, temperature=0.7, prompt_tokens=0, new_tokens=5).filled(budget) == Measured(
        k=1, temperature=0.7, prompt_tokens=0, new_tokens=5
    )


# ---------------------------------------------------------------- arithmetic


def tiny_run(num_depths: int = 2, layers: int = 2, **changes) -> PeagleRun:
    """10 shifted rows of 3 sequences, 10 steps, 4 of them with one depth; depth 1 keeps int(9 * 0.5) = 4 elements."""
    run = base(BUDGETS["smoke"], 0)
    head = dataclasses.replace(
        run.head,
        layers=layers,
        dim=8,
        mlp_dim=12,
        heads=4,
        kv_heads=2,
        head_dim=6,
        draft_vocab=32,
        aux_hidden_state_layers=(1, 2, 3),
    )
    data, how = (
        dataclasses.replace(run.data, seq_len=11, batch_size=3),
        dataclasses.replace(run.optimizer, steps=10),
    )
    cod = CodConfig(
        num_depths=num_depths, down_sample_ratio=0.5, down_sample_ratio_min=0.0, max_anchors=None
    )
    depth_schedule = (DepthStage(until=4, num_depths=1),) if num_depths > 1 else ()
    return dataclasses.replace(
        run,
        **{"head": head, "data": data, "optimizer": how, "cod": cod, "grow": depth_schedule}
        | changes,
    )


def products(rows: int, fused: int) -> int:
    """Multiplications of the tiny run's forward and loss for a sequence, matrix by matrix, and what a step does with each."""
    first = 16 * 24 + 2 * (16 * 12) + 24 * 8  # q, k and v read embedding and feature; o
    second = 8 * 24 + 2 * (8 * 12) + 24 * 8
    gated = 8 * 12 * 2 + 12 * 8
    seen = 2 * 2 * rows * 5 * 24  # q.k and weights.v, both layers, half of the ten keys
    layers, fusion, logits = (
        rows * (first + second + 2 * gated) + seen,
        fused * 3 * 8 * 8,
        rows * 8 * 32,
    )
    # fc's input needs no gradient; the head's logits forward, again, and backward, but not to a frozen matrix; the target's, and again
    return 3 * layers + 2 * fusion + 3 * logits + 2 * logits


def test_flops_by_hand():
    peagle = tiny_run()
    assert training_flops(peagle) == 3 * 2 * (4 * products(10, 10) + 6 * products(14, 10))
    eagle3 = as_eagle3(peagle, layers=2)
    assert training_flops(eagle3) == 3 * 2 * (
        4 * products(10, 10) + 6 * products(20, 10)
    )  # every row again at every depth


def test_what_costs_more():
    assert (
        training_flops(tiny_run(num_depths=1))
        < training_flops(tiny_run())
        < training_flops(tiny_run(num_depths=3))
        < training_flops(tiny_run(num_depths=3, depth_schedule=()))
    )
    assert (
        training_flops(tiny_run(layers=1))
        < training_flops(tiny_run())
        < training_flops(as_eagle3(tiny_run(), layers=2))
    )
    few = dataclasses.replace(tiny_run(), cod=dataclasses.replace(tiny_run().cod, max_anchors=4))
    assert training_flops(tiny_run(num_depths=1)) < training_flops(few) < training_flops(tiny_run())


@pytest.mark.parametrize("budget", BUDGETS)
def test_equal_arithmetic_is_equal(budget):
    """To a thirtieth: steps, and the steps at which depths grow, are whole."""
    ours, theirs = (
        Job(EXPERIMENTS["against_eagle3"], name, 0, budget).plain_run()
        for name in ("P-EAGLE", "EAGLE-3 of equal FLOPs")
    )
    assert training_flops(theirs) == pytest.approx(training_flops(ours), rel=1 / 30)


# ---------------------------------------------------------------- heads and losses, as shapes


@functools.cache
def target(folder, aux_hidden_state_layers: tuple[int, ...]):
    """The smoke budget's, without weights."""
    m = BUDGETS["smoke"].model
    hf = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": m.vocab,
        "num_hidden_layers": m.layers,
        "hidden_size": m.dim,
        "intermediate_size": m.mlp_dim,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": m.rope_theta,
        "max_position_embeddings": m.context,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    return tracing.abstract_target(
        folder / "config.json", dtype=jnp.float32, aux_hidden_state_layers=aux_hidden_state_layers
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Run -> (the head's config, shape and dtype of its loss over all depths); heads that differ in nothing that a trace sees, once."""
    folder = tmp_path_factory.mktemp("target")

    @functools.cache
    def trace(run):
        teacher = target(folder, run.head.aux_hidden_state_layers)
        config = new_head.head_config(run, teacher, 3)
        head = tracing.abstract_head(config)
        n = run.data.seq_len
        batch = Batch(np.ones((1, n), np.int32), np.zeros((1, n), np.int32), np.ones((1, n), bool))
        segment_ids, loss_mask = shifted(batch)
        cod = (
            cod_sample(loss_mask, segment_ids, run.cod, [0, 0])
            if isinstance(run, PeagleRun)
            else None
        )
        stored = (
            np.zeros((1, n, len(run.head.aux_hidden_state_layers) * 64), np.float32),
            np.zeros((1, n, 64), np.float32),
        )
        inputs = HeadBatch(
            batch, stored, segment_ids, loss_mask, cod, np.zeros((), np.int32), run.num_depths
        )
        trained, frozen = train_head._split(run, head)

        def loss(params, fixed, inputs):
            return train_head.head_loss(run, teacher, head, params, inputs, fixed)

        return config, *jax.eval_shape(loss, trained, (teacher.params, frozen), inputs)

    def seen(run):
        usual = base(BUDGETS["smoke"], 0)
        return trace(
            dataclasses.replace(run, depth_schedule=(), optimizer=usual.optimizer, init="random")
        )

    return seen


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_loss_can_be_formed(traced, name):
    for variant in EXPERIMENTS[name].variants:
        job = Job(EXPERIMENTS[name], variant, 0, "smoke")
        run = job.plain_run()
        config, loss, metrics = traced(run)
        assert (
            loss.shape == ()
            and loss.dtype == jnp.float32
            and metrics["accuracy"].shape == (run.num_depths,)
        ), variant
        for field in (
            "layers",
            "taps",
            "draft_vocab",
            "norm_before_fc",
            "fc_norm",
            "norm_before_residual",
        ):
            assert getattr(config, field) == getattr(run.head, field), (variant, field)
        assert (
            config.parallel == (job.variant.method == "peagle")
            and config.num_depths == run.num_depths
        )
        if config.parallel:
            assert (config.placeholder_hidden, config.placeholder_token) == (
                run.placeholder.hidden,
                run.placeholder.token,
            )


def test_what_vllm_refuses(traced):
    how = {
        (e.name, v): export_placeholders.how(traced(Job(e, v, 0, "smoke").plain_run())[0])
        for e, v in VARIANTS
    }
    refused = {variant for variant, said in how.items() if said.startswith("refused")}
    assert refused == {
        ("hidden_designs", v)
        for v in ("per_depth", "shared_depth", "low_rank", "last_feature", "gated")
    } | {("token_designs", "last_token")}
