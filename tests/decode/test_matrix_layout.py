"""Engines of one core each: which layout they choose for matrices, and that answers stay."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from peagle_jax import user_cache
from peagle_jax.decode import matrix_layout, parallel_engine
from peagle_jax.decode.generate import generate, make_drafter
from peagle_jax.decode.matrix_layout import in_fastest_layout
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.layers import column_blocks, products
from peagle_jax.layers.products import product
from peagle_jax.types import DraftState

SIZES = {"vocab": 48, "draft_vocab": 48, "target_dim": 24, "dim": 24, "mlp_dim": 40}


def models(of_head=(), **changes):
    """A target and a head with matrices of blocks of 8 columns."""
    sizes = {**SIZES, **changes}
    of_target = {x: y for x, y in sizes.items() if x not in ("draft_vocab", "target_dim")}
    return tiny.target(**of_target), tiny.head(**(sizes | dict(of_head)))


class SomebodysOwn:
    """A drafter that is not of this package."""

    k = 3

    def init(self, batch, cache_size): ...
    def prefill(self, params, state, tokens, aux_hidden_states, count): ...
    def step(self, params, state, tokens, aux_hidden_states, count): ...


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of 8 columns for all models, whatever the machine; and the calls that asked."""
    calls = []

    def are_faster(*kind):
        calls.append(kind)
        return True

    monkeypatch.setattr(column_blocks, "COLUMNS", 8)
    monkeypatch.setattr(matrix_layout, "LEAST_BYTES", 0)
    monkeypatch.setattr(matrix_layout, "has_bfloat16_matrix_units", lambda: False)
    monkeypatch.setattr(matrix_layout, "_are_blocks_faster", are_faster)
    return calls


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_are_those_of_plain_matrices(blocks, method, temperature):
    target, head = models()
    head = None if method == "none" else head
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 48, n).tolist() for n in (3, 17, 9, 5)]
    options = dict(k=head and 3, method=head and method, temperature=temperature, seed=5)

    def answers(num_threads):
        found = generate(
            target, head, prompts, max_new_tokens=20, num_threads=num_threads, **options
        )
        return [answer.output_token_ids for answer in found]

    assert answers(2) == answers(1)
    # 2 of the requests, and what a step reads of each
    (kind,) = blocks
    shapes, dtype, num_rows, num_threads = kind
    assert num_rows == 2 * (1 if head is None else 4)
    assert (dtype, num_threads, len(shapes)) == ("float32", 2, 4 * 6 + 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["markov", "tree", "eagle", "chunks"])
def test_answers_of_other_heads(blocks, kind, dtype):
    """Several chunks of a prompt, too; in bfloat16 products of 4 rows and more are the same."""
    of_head = {"markov": {"markov_rank": 3}, "eagle": {"mask_token": None}}.get(kind, {})
    target, head = models(of_head, dtype=dtype, **(tiny.FINAL if kind == "eagle" else {}))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 48, n).tolist() for n in (5, 21, 8, 13)]
    options: dict = {"num_tree_nodes": 5} if kind == "tree" else {}
    if kind == "chunks":
        options = {"prefill_chunk": 6}

    def answers(num_threads):
        options["num_threads"] = num_threads
        found = generate(target, head, prompts, k=3, max_new_tokens=15, **options)
        return [answer.output_token_ids for answer in found]

    assert answers(2) == answers(1)
    assert len(blocks) == 1


def test_all_engines_have_the_same_copy(blocks):
    target, head = models()
    drafter = make_drafter(head, 3, "peagle")
    more = dict(max_batch=4, num_threads=2)
    engine = make_engine(target, drafter, head.params, **more)
    # trees read a node in each place
    other = make_engine(target, drafter, head.params, num_tree_nodes=6, **more)
    assert [kind[2] for kind in blocks] == [2 * 4, 2 * 7]
    one, two = (each.engines[1]._batch.params for each in (engine, other))
    assert one[0]["blocks"][0]["mlp"]["up"]["kernel"].shape == (5, 24, 8)
    assert one[1]["layers"][0]["mlp"]["up"]["kernel"].shape == (5, 24, 8)
    assert all(map(lambda x, y: x is y, jax.tree.leaves(one), jax.tree.leaves(two)))
    assert engine.engines[0].spec.column_blocks  # which names other programs


def test_large_models_are_not_copied(blocks, monkeypatch):
    target, head = models()
    monkeypatch.setattr(parallel_engine, "MOST_WEIGHT_BYTES", 1000)
    engine = make_engine(target, None, head.params, max_batch=4, num_threads=2)
    assert engine.engines[0].target is target and not engine.engines[0].spec.column_blocks


def test_parameters_of_somebody_elses_drafter_stay(blocks):
    target, head = models()
    found = in_fastest_layout(
        target, SomebodysOwn(), head.params, rows=2, num_places=4, num_threads=2
    )
    assert found[1] is head.params and found[0] is not target


def test_one_engine_keeps_its_matrices(blocks):
    target, _ = models()
    engine = make_engine(target, max_batch=4, num_threads=1)
    assert engine.target is target and not blocks


def test_other_devices_keep_theirs(blocks, monkeypatch):
    monkeypatch.setattr(parallel_engine, "platform", lambda: "gpu")
    target, _ = models()
    engine = make_engine(target, max_batch=4, num_threads=2)
    assert all(each.target is target for each in engine.engines) and not blocks


def test_small_models_are_not_measured(blocks, monkeypatch):
    monkeypatch.setattr(matrix_layout, "LEAST_BYTES", 1 << 20)
    target, head = models()
    found = in_fastest_layout(target, None, head.params, rows=2, num_places=4, num_threads=2)
    assert found[0] is target and found[1] is head.params and not blocks


def test_processors_with_matrix_units_keep_plain_matrices(blocks, monkeypatch):
    monkeypatch.setattr(matrix_layout, "has_bfloat16_matrix_units", lambda: True)
    target, head = models()
    found = in_fastest_layout(target, None, head.params, rows=2, num_places=4, num_threads=2)
    assert found[0] is target and found[1] is head.params and not blocks


def test_slower_blocks_are_left(blocks, monkeypatch):
    monkeypatch.setattr(matrix_layout, "_are_blocks_faster", lambda *kind: False)
    target, head = models()
    found = in_fastest_layout(target, None, head.params, rows=2, num_places=4, num_threads=2)
    assert found[0] is target and found[1] is head.params


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """An empty folder for what is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matrix_layout._are_blocks_faster.cache_clear()
    yield tmp_path / "peagle_jax" / "matrix_layouts"
    matrix_layout._are_blocks_faster.cache_clear()


@pytest.mark.parametrize("blocks_take, expected", [(0.80, True), (0.90, False), (1.2, False)])
def test_blocks_must_be_worth_it(kept, monkeypatch, blocks_take, expected):
    def seconds(forms, num_rows, num_threads):
        assert (num_rows, num_threads) == (7, 3)
        assert [w.shape for w in forms["plain"][1]] == [(8, 128), (16, 64)]
        assert [w.shape for w in forms["blocks"][1]] == [(2, 8, 64), (1, 16, 64)]
        return {"plain": 1.0, "blocks": blocks_take}

    monkeypatch.setattr(matrix_layout, "_fastest_seconds", seconds)
    kind = ((8, 128), (16, 64)), "bfloat16", 7, 3
    assert matrix_layout._are_blocks_faster(*kind) == expected
    monkeypatch.setattr(matrix_layout, "_fastest_seconds", lambda *_: 1 / 0)
    assert matrix_layout._are_blocks_faster(*kind) == expected  # measured once
    matrix_layout._are_blocks_faster.cache_clear()
    assert matrix_layout._are_blocks_faster(*kind) == expected  # nor by another process
    for i, other in enumerate([((8, 128),), "float32", 6, 2]):
        changed = [*kind[:i], other, *kind[i + 1 :]]
        with pytest.raises(ZeroDivisionError):
            matrix_layout._are_blocks_faster(*changed)
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_process")
    matrix_layout._are_blocks_faster.cache_clear()
    with pytest.raises(ZeroDivisionError):
        matrix_layout._are_blocks_faster(*kind)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        "[]",
        '{"seconds": {"plain": 1}}',
        '{"seconds": {"plain": 1, "blocks": "x"}}',
        '{"seconds": {"plain": 1, "blocks": -1}}',
        '{"seconds": {"plain": NaN, "blocks": 1}}',
        b"\xff",
    ],
)
def test_a_damaged_file_is_measured_anew(kept, monkeypatch, content):
    kind = ((8, 128),), "bfloat16", 7, 3
    monkeypatch.setattr(matrix_layout, "_fastest_seconds", lambda *_: {"plain": 9.0, "blocks": 1.0})
    assert matrix_layout._are_blocks_faster(*kind)
    (file,) = kept.iterdir()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.setattr(matrix_layout, "_fastest_seconds", lambda *_: {"plain": 1.0, "blocks": 9.0})
    matrix_layout._are_blocks_faster.cache_clear()
    assert not matrix_layout._are_blocks_faster(*kind)
    assert json.loads(file.read_text())["seconds"] == {"plain": 1.0, "blocks": 9.0}
    assert json.loads(file.read_text())["about"]["rows"] == "7"


def test_a_folder_that_cannot_be_written(kept, monkeypatch):
    kept.parent.write_text("a file in its place")
    monkeypatch.setattr(matrix_layout, "_fastest_seconds", lambda *_: {"plain": 9.0, "blocks": 1.0})
    assert matrix_layout._are_blocks_faster(((8, 128),), "bfloat16", 7, 3)


def test_a_user_without_a_home(kept, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(user_cache.Path, "home", no_home)
    monkeypatch.setattr(matrix_layout, "_fastest_seconds", lambda *_: {"plain": 9.0, "blocks": 1.0})
    assert matrix_layout._are_blocks_faster(((8, 128),), "bfloat16", 7, 3)


def test_both_layouts_are_measured_in_fact(kept):
    """Whichever is faster here."""
    for dtype in ("float32", "bfloat16"):
        assert matrix_layout._are_blocks_faster(((8, 128), (16, 64)), dtype, 3, 2) in (True, False)
    assert len(list(kept.iterdir())) == 2


def test_the_slower_form_is_recognized():
    def twenty_times(x, w):
        def again(_, y):
            return product(x + 1e-9 * y[:, :1], w)

        return jax.lax.fori_loop(0, 20, again, product(x, w))

    ws = [jnp.ones((256, 512)), jnp.ones((512, 256))]
    forms = {"slow": (twenty_times, ws), "fast": (product, ws)}
    start = time.perf_counter()
    found = matrix_layout._fastest_seconds(forms, 8, 2)
    assert 0 < found["fast"] < found["slow"] < time.perf_counter() - start


def test_the_first_pass_of_eagle3_computes_one_row(monkeypatch):
    """Of its last layer; keys and values are those of all rows."""
    target, head = tiny.target(), tiny.head(layers=1)
    drafter = make_drafter(head, 3, "eagle3")
    found = []

    def note(x, w):
        found.append((x.size // x.shape[-1], *w.shape))
        return x.sum(axis=-1, keepdims=True) * w[:1].astype(x.dtype)

    monkeypatch.setattr(products, "_matmul", note)
    state = DraftState(drafter.init(5, 64), None)
    aux = jnp.zeros((5, 4, 3 * target.config.dim))
    tokens, count = jnp.ones((5, 4), jnp.int32), jnp.full(5, 2)

    def drafts(tokens, aux):
        return drafter.step(head.params, state, tokens, aux, count)[0]

    jax.eval_shape(drafts, tokens, aux)
    gate = 20, 36
    assert (5, *gate) in found and (20, *gate) not in found
    assert (20, 40, 20) in found  # keys, from embedding and hidden state
