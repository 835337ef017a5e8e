"""Every variant of every experiment, under every budget: what it changes, and what it shares."""

import dataclasses
import types
from pathlib import Path

import pytest

from experiments import questions, registry
from experiments.base import Experiment, Measurement, Variant
from experiments.base_run import as_eagle3, base_run, depth_schedule, with_depths
from experiments.budgets import BUDGETS
from experiments.jobs import Job
from experiments.registry import EXPERIMENTS
from experiments.rows import NAME
from peagle_jax.train.config import DepthStage, PeagleRun
from peagle_jax.types import InputError

VARIANTS = [
    (experiment, name) for experiment in EXPERIMENTS.values() for name in experiment.variants
]
# What each experiment calls the base. The two curves over a size of the base call it otherwise
# under other budgets.
BASE = {
    "hidden_designs": ["shared"],
    "token_designs": ["mask"],
    "block_attention": ["causal"],
    "context_injection": ["layers"],
    "true_tokens": ["0"],
    "regularization": ["none"],
    "cod_sampling": ["ratio 0.8 min 0.1"],
    "context_length": ["whole"],
    "embeddings": ["embedding trained"],
    "losses": ["forward_kl"],
    "aux_layers": ["low + high + last"],
    "data_amount": ["all answers", "greedy answers"],
    "warm_start": ["target's last layer"],
    "against_eagle3": ["P-EAGLE"],
    "sampling": ["0", "0.5", "1"],
    "sequential_head": ["P-EAGLE"],
    "one_forward": ["P-EAGLE"],
    "layers_and_state": ["P-EAGLE"],
    "depth_weights": ["equal"],
}
BASE_OF = {
    "smoke": {
        **BASE,
        "head_layers": ["1"],
        "speculation_depth": ["K 3"],
        "context_injection": [],  # of two layers at least
    },
    "small": {**BASE, "head_layers": ["2"], "speculation_depth": ["K 5", "trained 5 drafts 8"]},
    "sampled": {
        **BASE,
        "head_layers": ["2"],
        "speculation_depth": [],
        "data_amount": ["all answers"],
    },
    "full": {
        **BASE,
        "head_layers": ["4"],
        "speculation_depth": ["K 8"],
        "data_amount": ["all answers"],
    },
}
# The same head measured in the same way: EAGLE-3 has one layer, and so has the smoke budget's
# parallel head; all answers are greedy ones but for the budgets sampled and full.
GREEDY = ("all answers", "greedy answers")
EQUAL = {
    "smoke": [GREEDY, ("EAGLE-3", "EAGLE-3 of equal parameters")],
    "small": [GREEDY],
    "sampled": [],
    "full": [],
}
# (experiment, budget) whose reference is not the base, and what is then said of it
REFERENCE_CHANGES = {
    ("head_layers", "smoke"): ["head.layers: 1 -> 2"],
    ("context_injection", "smoke"): ["head.layers: 1 -> 2"],
    ("head_layers", "full"): ["head.layers: 4 -> 2"],
    ("speculation_depth", "full"): ["cod.num_depths: 8 -> 5"],
    ("speculation_depth", "sampled"): ["cod.num_depths: 7 -> 5"],
}


def jobs(budget: str, seed: int = 0) -> list[Job]:
    return [Job(experiment, name, seed, budget) for experiment, name in VARIANTS]


def test_every_question_is_in_the_registry_with_command_expectation_and_result():
    names = {path.stem for path in Path(questions.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(EXPERIMENTS) == names and len(registry.MODULES) == len(names)
    for module in registry.MODULES:
        e = module.EXPERIMENT
        assert module.__name__ == f"experiments.questions.{e.name}" and NAME.fullmatch(e.name)
        assert e.question.endswith("?") and module.__doc__.startswith(e.question), e.name
        assert all(
            word in module.__doc__
            for word in (f"python -m experiments.run {e.name} ", "\nExpects: ", "\nResult: ")
        ), e.name
        assert e.expects and e.axis and e.paper and len(e.variants) > 1, e.name


def test_what_an_experiment_refuses():
    plain = EXPERIMENTS["sampling"]
    with pytest.raises(ValueError, match="sampling: the reference 2 must be one of 0, 0.5, 1"):
        dataclasses.replace(plain, reference="2")
    with pytest.raises(ValueError, match="every variant of a curve needs x"):
        Experiment(
            **{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
            | {"variants": {"0": Variant()}}
        )
    base, after_base = Variant(x=0.0), Variant(x=1.0, init_from="0")
    for wrong in (
        {"0": base, "1": Variant(x=1.0, init_from="3")},  # which it does not have
        {"0": base, "1": after_base, "2": Variant(x=2.0, init_from="1")},
        {"0": Variant(x=0.0, init_from="0")},
    ):
        with pytest.raises(ValueError, match="a head starts from a variant of its experiment"):
            dataclasses.replace(plain, variants=wrong)


def test_a_file_has_the_name_of_its_experiment():
    copied = types.ModuleType("experiments.questions.learning_rate")
    copied.EXPERIMENT, copied.__file__ = EXPERIMENTS["losses"], "learning_rate.py"
    with pytest.raises(ValueError, match="learning_rate.py: must have name='learning_rate'; got"):
        registry.by_name([*registry.MODULES, copied])


def reading_layer_0(base: PeagleRun) -> PeagleRun:
    head = dataclasses.replace(base.head, aux_hidden_state_layers=(0, 4, 5))
    return dataclasses.replace(base, head=head)


@pytest.mark.parametrize(
    ("variant", "budget", "said"),
    [
        (
            Variant(run=as_eagle3),
            "small",
            "task eagle3 trains drafts by that method; got peagle",
        ),
        (
            Variant(run=reading_layer_0),
            "small",
            r"that are stored, \[1, 4, 5\]; got \[0, 4, 5\]; choose",
        ),
        (Variant(measurements=(Measurement(max_new_tokens=1),)), "small", "at least 2 new tokens"),
        (Variant(measurements=(Measurement(max_new_tokens=7),)), "sampled", "at least 8 new"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(variant, budget, said):
    experiment = dataclasses.replace(
        EXPERIMENTS["losses"], reference="new", variants={"new": variant}
    )
    job = Job(experiment, "new", 0, budget)
    with pytest.raises(InputError, match=f"losses, new: .*{said}"):
        job.check()


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_run_is_valid_and_its_hidden_states_are_stored(budget):
    for job in jobs(budget):
        run = job.plain_run()  # its dataclasses check themselves
        job.check()
        hidden_states, *others = job.stages()
        prompts = [stage for stage in others if stage.name == "prompts"]
        texts = [stage for stage in others if stage.name == "continuations"]
        on_text = {(m.max_new_tokens, m.temperature) for m in job.measurements() if m.on_text}
        assert {tuple(stage.config.values()) for stage in texts} == on_text, job.name
        stored = set(hidden_states.config["aux_hidden_state_layers"])
        assert set(run.aux_hidden_state_layers) <= stored, job.name
        assert hidden_states.config["seq_len"] == run.data.seq_len, job.name
        assert (job.variant.method == "peagle") == isinstance(run, PeagleRun), job.name
        last = 1 if job.variant.method == "eagle" else run.num_depths
        assert run.num_depths_at(0) <= last == run.num_depths_at(run.optimizer.steps - 1)
        lengths = {m.prompt_tokens for m in job.measurements()}
        lengths.add(job.budget.answers.prompt_tokens)
        assert {stage.config["num_tokens"] for stage in prompts} == lengths
        for m in job.measurements():
            assert None not in dataclasses.asdict(m).values()
            assert m.prompt_tokens + m.max_new_tokens + m.k < job.budget.model.context
        assert run.data.seq_len <= job.budget.model.context
        assert job.answers.num_samples >= run.data.batch_size


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_each_variant_changes(budget):
    for job in jobs(budget):
        unchanged = job.name in BASE_OF[budget][job.experiment.name]
        changes = [c for c in job.changes() if not c.startswith("decoding.")]
        assert (changes == []) == unchanged, (job.experiment.name, job.name, changes)
        if job.name == job.experiment.reference and not unchanged:
            assert (
                job.changes()[0]
                == REFERENCE_CHANGES.get((job.experiment.name, budget), ["cod.num_depths: 3 -> 5"])[
                    0
                ]
            ), job.changes()


def test_changes_in_words():
    def say(experiment, name):
        return Job(EXPERIMENTS[experiment], name, 3, "small").changes()

    assert say("hidden_designs", "gated") == ["placeholder.hidden: shared -> gated"]
    assert say("context_length", "half") == ["data.batch_size: 2 -> 4", "data.seq_len: 128 -> 64"]
    assert say("data_amount", "a sixteenth") == ["answers.num_samples: 4096 -> 256"]
    assert say("data_amount", "answers at temperature 1") == [
        "answers.temperatures: (0.0,) -> (1.0,)"
    ]
    assert (
        say("sampling", "0.5") == ["decoding.temperature: 0.0 -> 0.5"]
        and say("sampling", "0") == []
    )
    assert say("speculation_depth", "trained 5 drafts 8") == ["decoding.k: 5 -> 8"]
    assert say("warm_start", "EAGLE-3 head") == ["init_from: the EAGLE-3 head itself"]
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
        ("one_forward", "EAGLE-3"),
        ("sequential_head", "EAGLE-3"),
        ("layers_and_state", "EAGLE-3"),
    ]
    markov = [(name, "with a Markov head") for name in ("sequential_head", "one_forward")]
    more_layers, state = "EAGLE-3, twice the layers", "an RNN head"
    expected = {
        frozenset([("one_forward", more_layers), ("layers_and_state", more_layers)]),
        frozenset(
            [
                ("sequential_head", f"with {state} of rank 128"),
                ("layers_and_state", f"with {state}"),
            ]
        ),
        frozenset([*eagle3, ("against_eagle3", "EAGLE-3")] if budget == "smoke" else eagle3),
        frozenset(markov),
    }
    if budget in ("small", "sampled"):
        expected.add(frozenset([("head_layers", "4"), ("one_forward", "twice the layers")]))
    if budget != "small":
        expected.add(
            frozenset([("speculation_depth", "K 5"), ("speculation_depth", "trained 5 drafts 8")])
        )
    if budget == "smoke":
        two = [("head_layers", "2"), ("context_injection", "layers")]
        expected.add(frozenset([*two, ("one_forward", "twice the layers")]))
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


def test_a_warm_start_is_of_a_head_that_is_trained_on_the_same_hidden_states():
    for budget in BUDGETS:
        warm = [job for job in jobs(budget) if job.initial_job()]
        assert [(job.experiment.name, job.name) for job in warm] == [("warm_start", "EAGLE-3 head")]
        for job in warm:
            before = job.initial_job()
            assert (
                before.stages()[0].key == job.stages()[0].key
                and before.seed == job.seed
                and before.initial_job() is None
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
    assert run.init_from == str(job.initial_job().head_folder(tmp_path)) and run.out == str(
        job.head_folder(tmp_path)
    )
    emptied = dataclasses.replace(
        run,
        target="",
        hidden_states_dir="",
        out="",
        init_from=None,
        data=dataclasses.replace(run.data, source=""),
    )
    assert emptied == plain and not any(
        value == "" for value in (run.target, run.hidden_states_dir, run.out, run.data.source)
    )


# ---------------------------------------------------------------- depths


@pytest.mark.parametrize(
    ("steps", "num_depths", "wanted"),
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
def test_depth_schedule(steps, num_depths, wanted):
    assert depth_schedule(steps, num_depths) == tuple(
        DepthStage(until=until, num_depths=d) for until, d in wanted
    )


@pytest.mark.parametrize("num_depths", [1, 2, 3, 8])
def test_with_depths(num_depths):
    usual = base_run(BUDGETS["small"], 7)
    run = with_depths(usual, num_depths)
    assert (
        run.num_depths == num_depths
        and run.depth_schedule == depth_schedule(usual.optimizer.steps, num_depths)
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


def test_a_measurement_takes_from_the_budget_what_it_does_not_say():
    budget = BUDGETS["smoke"]
    assert Measurement().with_defaults(budget) == Measurement(
        k=3,
        temperature=0.0,
        sample_drafts=False,
        on_text=False,
        prompt_tokens=16,
        max_new_tokens=16,
    )
    complete = Measurement(
        k=1,
        temperature=0.7,
        sample_drafts=True,
        on_text=True,
        prompt_tokens=0,
        max_new_tokens=5,
    )
    assert complete.with_defaults(budget) == complete


def test_measurements_on_text():
    """Equal ones are one; texts end after the drafts of a step; drafts are argmaxes where said."""
    sampling = Job(EXPERIMENTS["sampling"], "0.5", 0, "sampled")
    assert [m.sample_drafts for m in sampling.measurements()] == [False, True]
    assert len(Job(EXPERIMENTS["sequential_head"], "P-EAGLE", 0, "sampled").measurements()) == 2
    assert len(Job(EXPERIMENTS["sequential_head"], "P-EAGLE", 0, "small").measurements()) == 1
    (first, *_) = sampling.measurements()
    assert sampling.text_of(dataclasses.replace(first, on_text=False)) is None
    assert sampling.text_of(dataclasses.replace(first, max_new_tokens=8)) is not None
