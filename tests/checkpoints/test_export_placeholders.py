"""Placeholder designs in the one form that vLLM has.

What can be written so drafts as before. What cannot is refused, and still decodes from its run.
"""

import dataclasses
import functools
import json
from pathlib import Path

import designs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints.folder_edits import equal

from peagle_jax.checkpoints import export_placeholders, param_mapping
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import from_model, save_drafter, write_head
from peagle_jax.checkpoints.runs import load_drafter, open_run, read_run, write_run
from peagle_jax.decode.generate import make_drafter
from peagle_jax.draft.placeholders import HIDDEN_DESIGNS, TOKEN_DESIGNS
from peagle_jax.train.attention import PackedCausal
from peagle_jax.types import DraftState, InputError

K, SHAPE = 4, {"layers": 1, "windows": (None,)}
FUSIONS = {"plain": {}, "norm_before_fc": {"norm_before_fc": True}, "fc_norm": {"fc_norm": True}}
EXPORTED = [
    *(
        (hidden, "mask", num_depths)
        for hidden, num_depths in (
            ("shared_fused", 6),
            ("zero", 6),
            ("mean_feature", 6),
            ("frozen_random", 6),
            ("per_depth", 2),
            ("shared_depth", 2),
            ("low_rank", 2),
        )
    ),
    ("shared", "frozen", 6),
    ("shared", "zero", 6),
    ("shared", "mean", 6),
    ("shared_fused", "mean", 6),
    ("per_depth", "frozen", 2),
]
TEXT, DEPTH = (
    "its placeholders depend on the text before them",
    "its placeholders differ from depth to depth",
)
REFUSED = {
    ("per_depth", "mask", 3): DEPTH,
    ("shared_depth", "mask", 6): DEPTH,
    ("low_rank", "mask", 6): DEPTH,
    ("last_feature", "mask", 2): TEXT,
    ("gated", "mask", 6): TEXT,
    ("zero", "last_token", 6): TEXT,
    ("shared", "last_token", 6): TEXT,
    ("per_depth", "last_token", 2): TEXT,
}


def a_head(hidden, token, num_depths, **changes):
    return tiny.head(
        **{
            **SHAPE,
            "placeholder_hidden": hidden,
            "placeholder_token": token,
            "num_depths": num_depths,
            **changes,
        }
    )


def fuse(head, aux_hidden_states):
    """draft/fusion.py in NumPy: [n A] -> [n D]."""
    fusion, eps = head.params["fusion"], head.config.norm_eps

    def norm(x, params):
        scale = np.asarray(params["scale"], np.float64)
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale

    x = np.asarray(aux_hidden_states, np.float64)
    if head.config.norm_before_fc:
        x = norm(x, fusion["input_norm"])
    if head.config.fc_norm:
        parts = np.split(x, 3, axis=-1)
        x = np.concatenate([norm(p, fusion["fc_norm"][i]) for i, p in enumerate(parts)], axis=-1)
    return x @ np.asarray(fusion["fc"]["kernel"], np.float64)


@functools.cache
def greedy_text() -> tuple[np.ndarray, np.ndarray]:
    """What the tiny target answers greedily, with the prompt; and its aux hidden states."""
    model, text = tiny.target(), [7, 30, 2, *tiny.greedy((7, 30, 2), 24)]
    tokens = jnp.asarray([text], jnp.int32)
    positions = jnp.arange(len(text))[None]
    attend = PackedCausal(jnp.zeros_like(tokens))

    @jax.jit
    def aux_hidden_states(params):
        out, _ = model.bind(params)(tokens, positions, attend, None)
        return out.aux_hidden_states[0]

    return np.asarray(text), np.asarray(aux_hidden_states(model.params))


@functools.partial(jax.jit, static_argnums=0)
def _drafts(drafter, params, tokens, aux_hidden_states):
    """K drafts after each token; tokens[i] comes with the hidden states of the token before it."""

    def pad(x):
        return jnp.pad(x[None, None], [(0, 0), (0, drafter.k)] + [(0, 0)] * x.ndim)

    def step(state, row):
        token, aux = pad(row[0]), pad(row[1])
        ids, _, state = drafter.step(params, state, token, aux, jnp.ones(1, jnp.int32))
        return state, ids[0]

    return jax.lax.scan(step, DraftState(drafter.init(1, 48), None), (tokens, aux_hidden_states))[1]


def drafts(head) -> np.ndarray:
    text, aux_hidden_states = greedy_text()
    return np.asarray(
        _drafts(
            make_drafter(head, K, "peagle"),
            head.params,
            jnp.asarray(text[1:], jnp.int32),
            jnp.asarray(aux_hidden_states[:-1]),
        )
    )


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * max(np.abs(want).max(), 1e-3))


def embedding_table(head):
    return np.asarray(head.params["embed"]["table"])


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("hidden, token, num_depths", EXPORTED)
def test_what_is_exported_drafts_as_before(hidden, token, num_depths, fusion, tmp_path):
    head = a_head(hidden, token, num_depths, **FUSIONS[fusion])
    anchor = np.zeros(20)
    fused = designs.fused(head, 1, anchor, functools.partial(fuse, head))
    row = designs.embedding(head, anchor)
    want = drafts(head)
    # placeholders that always draft the same would show nothing
    assert len(np.unique(want[:, 1:])) > 2
    status = export_placeholders.export_status(head.config)
    row_changed = vector_changed = False
    for checkpoint_format in ("vllm", "speculators") if fusion != "fc_norm" else ("vllm",):
        save_drafter(head, tmp_path / checkpoint_format, checkpoint_format)
        loaded = load_drafter(tmp_path / checkpoint_format)
        cfg = loaded.config
        assert (cfg.placeholder_hidden, cfg.placeholder_token) == ("shared", "mask")
        assert cfg.num_depths == num_depths
        assert "placeholder" not in loaded.params and loaded.params["mask_hidden"].shape == (72,)
        loaded_fuse = functools.partial(fuse, loaded)
        assert_close(designs.fused(loaded, 1, anchor, loaded_fuse), fused)
        np.testing.assert_array_equal(designs.embedding(loaded, anchor), row)
        np.testing.assert_array_equal(drafts(loaded), want)
        for part in head.params.keys() - {"placeholder", "mask_hidden", "embed"}:
            jax.tree.map(np.testing.assert_array_equal, loaded.params[part], head.params[part])
        before, after = embedding_table(head), embedding_table(loaded)
        np.testing.assert_array_equal(np.delete(before, 5, axis=0), np.delete(after, 5, axis=0))
        row_changed = not np.array_equal(before, after)
        vector_changed = "mask_hidden" not in head.params or not np.array_equal(
            loaded.params["mask_hidden"], head.params["mask_hidden"]
        )
    if row_changed or vector_changed:
        assert status.startswith("rewritten: ")
        assert ("mask token's row" in status) == row_changed
        assert status.startswith("rewritten: its vector in the mask") != vector_changed
    else:
        assert status == "as it is"


@pytest.mark.parametrize("hidden, token, num_depths", REFUSED)
def test_what_is_refused_says_why_and_writes_nothing(hidden, token, num_depths, tmp_path):
    head = a_head(hidden, token, num_depths)
    reason = f"{REFUSED[hidden, token, num_depths]}; vLLM has one pair of vectors for all"
    for checkpoint_format in ("vllm", "speculators"):
        with pytest.raises(InputError) as error:
            save_drafter(head, tmp_path / "out", checkpoint_format)
        assert str(error.value) == (
            f"peagle_jax.save_drafter: {reason}; got {hidden}, {token}; "
            "decode it here with peagle generate; it cannot be exported"
        )
        assert not list(tmp_path.iterdir())
    assert export_placeholders.export_status(head.config) == f"refused: {reason}"


@pytest.mark.parametrize(
    "changes, checkpoint_format, got",
    [
        ({"placeholder_attention": "bidirectional"}, "vllm", "bidirectional, layers"),
        (
            {"placeholder_attention": "committed", "placeholder_hidden": "gated"},
            "speculators",
            "committed, layers",
        ),
        ({"placeholder_context": "injected", "markov_rank": 3}, "peagle_jax", "causal, injected"),
    ],
)
def test_other_attention_is_refused(changes, checkpoint_format, got, tmp_path):
    head = tiny.head(**changes)
    assert export_placeholders.export_status(head.config).startswith("refused: vLLM's ")
    with pytest.raises(InputError) as error:
        save_drafter(head, tmp_path / "out", checkpoint_format)
    reason = "vLLM's layers have keys" if "injected" in got else "vLLM's placeholders attend to"
    assert reason in str(error.value)
    assert f"got {got}; decode it here with peagle generate; it cannot" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_new_design_is_refused_until_it_has_an_export_status():
    """A wrong folder would be silent: vLLM drafts from any vector."""
    for changed in ({"placeholder_hidden": "brand_new"}, {"placeholder_token": "brand_new"}):
        config = dataclasses.replace(a_head("shared", "mask", 6).config, **changed)
        status = export_placeholders.export_status(config)
        assert status == f"refused: {export_placeholders.UNKNOWN}"
        head = dataclasses.replace(from_model(a_head("shared", "mask", 6)), config=config)
        with pytest.raises(InputError, match="add the design to HIDDEN_EXPORTS or TOKEN_EXPORTS"):
            export_placeholders.to_vllm_placeholders(head)
    # both descriptions of the registry, and the list of exports, know the same designs
    assert tuple(HIDDEN_DESIGNS) == designs.HIDDEN_DESIGNS
    assert tuple(TOKEN_DESIGNS) == designs.TOKEN_DESIGNS
    assert export_placeholders.HIDDEN_EXPORTS.keys() == HIDDEN_DESIGNS.keys()
    assert export_placeholders.TOKEN_EXPORTS.keys() == TOKEN_DESIGNS.keys()


def test_every_design_is_exported_or_refused():
    """Of the whole registry; a head that does not draft in parallel has nothing to rewrite."""
    refused_hidden = ("per_depth", "shared_depth", "low_rank", "last_feature", "gated")
    for hidden in designs.HIDDEN_DESIGNS:
        for token in designs.TOKEN_DESIGNS:
            config = tiny.head_config(placeholder_hidden=hidden, placeholder_token=token)
            is_refused = hidden in refused_hidden or token == "last_token"
            status = export_placeholders.export_status(config)
            assert status.startswith("refused: ") == is_refused
            autoregressive = dataclasses.replace(config, mask_token=None)
            assert export_placeholders.export_status(autoregressive) == "as it is"
    assert export_placeholders.export_status(tiny.head_config()) == "as it is"


@pytest.mark.parametrize(
    "fusion, changes, words",
    [
        ("norm_before_fc", {}, "a shortest of"),
        ("fc_norm", {}, "fc must reach the placeholder's vector"),
        ("plain", {"dim": 80, "heads": 4}, "fc must reach the placeholder's vector"),
        ("norm_before_fc", {"fc_norm": True}, "two norms and fc"),
    ],
)
def test_vectors_that_fc_does_not_reach(fusion, changes, words, tmp_path):
    """Behind a norm only vectors of one length are; and where D is more than A, hardly any."""
    head = a_head("shared_fused", "mask", 6, **FUSIONS[fusion], **changes)
    placeholder = {"fused": 100 * head.params["placeholder"]["fused"]}
    far = dataclasses.replace(head, params={**head.params, "placeholder": placeholder})
    with pytest.raises(InputError) as error:
        save_drafter(far, tmp_path / "out")
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("token", ["frozen", "zero", "mean"])
def test_a_token_needs_a_row_of_the_heads_own(token, tmp_path):
    """A head that shares the target's embedding has no row to put its vector into."""
    head = a_head("zero", token, 6)
    shared = from_model(head)
    shared.tensors.pop(param_mapping.EMBEDDING)
    for write in (
        functools.partial(write_head, shared, checkpoint_format="vllm"),
        functools.partial(save_drafter, head, own_embedding=False),
    ):
        with pytest.raises(InputError) as error:
            write(path=tmp_path / "out")
        assert (
            "the head needs an embedding of its own; got the target's; export it with its embedding"
        ) in str(error.value)
        assert "\n" not in str(error.value)
        assert not list(tmp_path.iterdir())
    # the mask token's own row needs no place
    save_drafter(a_head("zero", "mask", 6), tmp_path / "out", own_embedding=False)
    table = np.zeros((41, 20), np.float32)
    np.testing.assert_array_equal(
        load_drafter(tmp_path / "out", embedding=table).params["mask_hidden"], np.zeros(72)
    )


def test_the_heads_own_tensors_are_left_alone(tmp_path):
    head = a_head("shared_fused", "zero", 6)
    before = jax.tree.map(np.array, head.params)
    save_drafter(head, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, before, head.params)


ATTENTION_DESIGNS = {
    "committed": {"placeholder_attention": "committed"},
    "injected": {"placeholder_context": "injected", "layers": 3, "windows": (None,) * 3},
}


@pytest.mark.parametrize("name", [*designs.ALL, *ATTENTION_DESIGNS])
def test_a_run_keeps_every_design(name, tmp_path):
    """Through Orbax and head.json, bit for bit; also what no folder for vLLM can hold."""
    head = tiny.head(**{**SHAPE, **(designs.ALL | ATTENTION_DESIGNS)[name]})
    write_run(from_model(head), head, tmp_path / "run")
    equal(read_run(tmp_path / "run"), head)
    state = open_run(tmp_path / "run")
    names = {name for name in state.tensors if name.startswith("placeholder.")}
    assert names == {f"placeholder.{name}" for name in head.params.get("placeholder", {})}
    state.check()
    if export_placeholders.export_status(head.config).startswith("refused"):
        with pytest.raises(InputError, match="cannot be exported"):
            convert(tmp_path / "run", tmp_path / "out", to="vllm")
        assert not (tmp_path / "out").exists()


def edited(run, **changes):
    path = run / "head.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def test_a_run_from_before_the_designs_is_the_papers(tmp_path):
    write_run(from_model(tiny.head(**SHAPE)), tiny.head(**SHAPE), tmp_path)
    edited(
        tmp_path,
        placeholder_hidden=...,
        placeholder_token=...,
        placeholder_attention=...,
        placeholder_context=...,
    )
    equal(read_run(tmp_path), tiny.head(**SHAPE))


@pytest.mark.parametrize(
    "key, value, known",
    [
        ("placeholder_hidden", "mean", "shared, shared_fused, per_depth"),
        ("placeholder_token", "shared", "mask, frozen, last_token"),
        ("placeholder_hidden", None, "shared, shared_fused"),
        ("placeholder_token", 3, "mask, frozen"),
        ("placeholder_hidden", ["shared"], "shared, shared_fused"),
        ("placeholder_attention", "block", "causal, bidirectional, committed"),
        ("placeholder_context", False, "layers, injected"),
    ],
)
def test_a_design_that_does_not_exist(key, value, known, tmp_path):
    write_run(from_model(tiny.head(**SHAPE)), tiny.head(**SHAPE), tmp_path)
    edited(tmp_path, **{key: value})
    with pytest.raises(InputError) as error:
        read_run(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'head.json'}: {key} must be one of {known}")
    assert f"; got {value}; copy head.json from a backup, or train again" in message


def test_a_run_of_another_design_than_its_checkpoint(tmp_path):
    """head.json says gated, the checkpoint has no gate."""
    write_run(from_model(tiny.head(**SHAPE)), tiny.head(**SHAPE), tmp_path)
    edited(tmp_path, placeholder_hidden="gated")
    with pytest.raises(
        InputError,
        match=r"must hold the parameters of head.json; got a difference at placeholder.gate; copy",
    ):
        read_run(tmp_path)


@pytest.mark.parametrize("side", ["hidden", "token"])
def test_the_documents_say_what_happens(side):
    """docs/checkpoints.md lists every design, with the first word of what becomes of it."""
    known = {"hidden": HIDDEN_DESIGNS, "token": TOKEN_DESIGNS}[side]
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if f"| {side} |" in line]
    documented = {name: row[3] for row in rows for name in known if f"`{name}`" in row[2]}
    assert documented.keys() == known.keys()
    for name, words in documented.items():
        config = tiny.head_config(**{f"placeholder_{side}": name})
        status = export_placeholders.export_status(config)
        assert words.split()[0].rstrip(":") == status.split(":")[0].split()[0], name
