"""Placeholder designs in vLLM's one form: what can be written drafts as before, what cannot is refused and still decodes from its run."""

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
from peagle_jax.checkpoints.head_io import load_drafter, of_model, save_drafter, write_head
from peagle_jax.checkpoints.runs import open_run, read_run, write_run
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
            "depths": num_depths,
            **changes,
        }
    )


def fuse(head, aux_hidden_states):
    """draft/fusion.py's words in NumPy: [n A] -> [n D]."""
    fusion, eps = head.params["fusion"], head.config.norm_eps

    def norm(x, scale):
        return (
            x
            / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
            * np.asarray(scale["scale"], np.float64)
        )

    aux_hidden_states = np.asarray(aux_hidden_states, np.float64)
    if head.config.norm_before_fc:
        aux_hidden_states = norm(aux_hidden_states, fusion["input_norm"])
    if head.config.fc_norm:
        aux_hidden_states = np.concatenate(
            [
                norm(x, fusion["fc_norm"][i])
                for i, x in enumerate(np.split(aux_hidden_states, 3, axis=-1))
            ],
            axis=-1,
        )
    return aux_hidden_states @ np.asarray(fusion["fc"]["kernel"], np.float64)


@functools.cache
def said() -> tuple[np.ndarray, np.ndarray]:
    """What the tiny target answers, greedily, prompt included; and its taps."""
    model, text = tiny.target(), [7, 30, 2, *tiny.greedy((7, 30, 2), 24)]
    tokens = jnp.asarray([text], jnp.int32)
    read = jax.jit(
        lambda p: (
            model.bind(p)(
                tokens, jnp.arange(len(text))[None], PackedCausal(jnp.zeros_like(tokens)), None
            )[0].aux_hidden_states
        )
    )
    return np.asarray(text), np.asarray(read(model.params)[0])


@functools.partial(jax.jit, static_argnums=0)
def _drafts(drafter, params, tokens, aux_hidden_states):
    """tokens[i] is committed with the taps of the token before it; after each, K drafts."""

    def pad(x):
        return jnp.pad(x[None, None], [(0, 0), (0, drafter.k)] + [(0, 0)] * x.ndim)

    def step(state, row):
        ids, _, state = drafter.step(
            params, state, pad(row[0]), pad(row[1]), jnp.ones(1, jnp.int32)
        )
        return state, ids[0]

    return jax.lax.scan(step, DraftState(drafter.init(1, 48), None), (tokens, aux_hidden_states))[1]


def drafts(head) -> np.ndarray:
    text, aux_hidden_states = said()
    return np.asarray(
        _drafts(
            make_drafter(head, K, "peagle"),
            head.params,
            jnp.asarray(text[1:], jnp.int32),
            jnp.asarray(aux_hidden_states[:-1]),
        )
    )


def same_features(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * max(np.abs(want).max(), 1e-3))


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("hidden, token, depths", EXPORTED)
def test_what_is_exported_drafts_as_before(hidden, token, num_depths, fusion, tmp_path):
    head, behind = a_head(hidden, token, num_depths, **FUSIONS[fusion]), np.zeros(20)
    of = functools.partial(fuse, head)
    feature, row = designs.fused(head, 1, behind, of), designs.embedding(head, behind)
    want = drafts(head)
    assert (
        len(np.unique(want[:, 1:])) > 2
    )  # placeholders that always draft the same would show nothing
    how, changed = export_placeholders.how(head.config), {}
    for checkpoint_format in ("vllm", "speculators") if fusion != "fc_norm" else ("vllm",):
        save_drafter(head, tmp_path / checkpoint_format, checkpoint_format=checkpoint_format)
        loaded = load_drafter(tmp_path / checkpoint_format)
        assert (
            loaded.config.placeholder_hidden,
            loaded.config.placeholder_token,
            loaded.config.num_depths,
        ) == ("shared", "mask", num_depths)
        assert "placeholder" not in loaded.params and loaded.params["mask_hidden"].shape == (72,)
        same_features(designs.fused(loaded, 1, behind, functools.partial(fuse, loaded)), feature)
        np.testing.assert_array_equal(designs.embedding(loaded, behind), row)
        np.testing.assert_array_equal(drafts(loaded), want)
        for part in head.params.keys() - {"placeholder", "mask_hidden", "embed"}:
            jax.tree.map(np.testing.assert_array_equal, loaded.params[part], head.params[part])
        tables = [
            np.delete(np.asarray(x.params["embed"]["table"]), 5, axis=0) for x in (head, loaded)
        ]
        np.testing.assert_array_equal(*tables)
        changed = {
            "row": not np.array_equal(
                loaded.params["embed"]["table"], head.params["embed"]["table"]
            ),
            "vector": "mask_hidden" not in head.params
            or not np.array_equal(loaded.params["mask_hidden"], head.params["mask_hidden"]),
        }
    if any(changed.values()):
        assert how.startswith("rewritten: ")
        assert ("mask token's row" in how) == changed["row"] and how.startswith(
            "rewritten: its vector in the mask"
        ) != changed["vector"]
    else:
        assert how == "as it is"


@pytest.mark.parametrize("hidden, token, depths", REFUSED)
def test_what_is_refused_says_why_and_writes_nothing(hidden, token, num_depths, tmp_path):
    head, why = a_head(hidden, token, num_depths), REFUSED[hidden, token, num_depths]
    for checkpoint_format in ("vllm", "speculators"):
        with pytest.raises(InputError) as error:
            save_drafter(head, tmp_path / "out", checkpoint_format=checkpoint_format)
        line = str(error.value)
        assert (
            "\n" not in line
            and line
            == f"peagle_jax.save_drafter: {why}; vLLM has one pair of vectors for all; got {hidden}, {token}; decode it here; it cannot be exported"
        )
        assert not list(tmp_path.iterdir())
    assert (
        export_placeholders.how(head.config)
        == f"refused: {why}; vLLM has one pair of vectors for all"
    )


def test_a_new_design_is_refused_until_somebody_says_how():
    """A wrong folder would be silent: vLLM drafts from any vector."""
    for changed in ({"placeholder_hidden": "brand_new"}, {"placeholder_token": "brand_new"}):
        config = dataclasses.replace(a_head("shared", "mask", 6).config, **changed)
        assert export_placeholders.how(config) == f"refused: {export_placeholders.UNKNOWN}"
    assert (
        tuple(HIDDEN_DESIGNS) == designs.HIDDEN_DESIGNS
        and tuple(TOKEN_DESIGNS) == designs.TOKEN_DESIGNS
    )  # both descriptions of the registry know it


def test_every_design_is_exported_or_refused():
    """Of the whole registry: `how` knows each, and says of a head that does not draft in parallel that there is nothing to rewrite."""
    for hidden in designs.HIDDEN_DESIGNS:
        for token in designs.TOKEN_DESIGNS:
            config = tiny.head_config(placeholder_hidden=hidden, placeholder_token=token)
            refused = (
                hidden in ("per_depth", "shared_depth", "low_rank", "last_feature", "gated")
                or token == "last_token"
            )
            assert export_placeholders.how(config).startswith("refused: ") == refused
            assert (
                export_placeholders.how(dataclasses.replace(config, mask_token=None)) == "as it is"
            )
    assert export_placeholders.how(tiny.head_config()) == "as it is"


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
    far = dataclasses.replace(
        head,
        params={**head.params, "placeholder": {"fused": 100 * head.params["placeholder"]["fused"]}},
    )
    with pytest.raises(InputError) as error:
        save_drafter(far, tmp_path / "out")
    assert (
        words in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize("token", ["frozen", "zero", "mean"])
def test_a_token_needs_a_row_of_the_heads_own(token, tmp_path):
    """A head that reads the target's embedding, or is to be written so, has no row to put its vector into."""
    head = a_head("zero", token, 6)
    shared = of_model(head)
    shared.tensors.pop(param_mapping.EMBEDDING)
    for write in (
        functools.partial(write_head, shared, checkpoint_format="vllm"),
        functools.partial(save_drafter, head, own_embedding=False),
    ):
        with pytest.raises(InputError) as error:
            write(path=tmp_path / "out")
        line = str(error.value)
        assert (
            "the head needs an embedding of its own; got the target's; export it with its embedding"
            in line
            and "\n" not in line
        )
        assert not list(tmp_path.iterdir())
    save_drafter(
        a_head("zero", "mask", 6), tmp_path / "out", own_embedding=False
    )  # nothing to put there
    table = np.zeros((41, 20), np.float32)
    np.testing.assert_array_equal(
        load_drafter(tmp_path / "out", embedding=table).params["mask_hidden"], np.zeros(72)
    )


def test_the_heads_own_tensors_are_left_alone(tmp_path):
    head = a_head("shared_fused", "zero", 6)
    before = jax.tree.map(np.array, head.params)
    save_drafter(head, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, before, head.params)


@pytest.mark.parametrize("name", designs.ALL)
def test_a_run_keeps_every_design(name, tmp_path):
    """Through Orbax and head.json, bit for bit; also what no folder for vLLM can hold."""
    head = tiny.head(**SHAPE, **designs.ALL[name])
    write_run(of_model(head), head, tmp_path / "run")
    equal(read_run(tmp_path / "run"), head)
    form = open_run(tmp_path / "run")
    own = {n for n in form.tensors if n.startswith("placeholder.")}
    assert own == {f"placeholder.{n}" for n in head.params.get("placeholder", {})}
    form.check()
    if export_placeholders.how(head.config).startswith("refused"):
        with pytest.raises(InputError, match="cannot be exported"):
            convert(tmp_path / "run", tmp_path / "out", to="vllm")
        assert not (tmp_path / "out").exists()


def edited(run, **changes):
    path = run / "head.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def test_a_run_from_before_the_designs_is_the_papers(tmp_path):
    write_run(of_model(tiny.head(**SHAPE)), tiny.head(**SHAPE), tmp_path)
    edited(tmp_path, placeholder_hidden=..., placeholder_token=...)
    equal(read_run(tmp_path), tiny.head(**SHAPE))


@pytest.mark.parametrize(
    "key, value, known",
    [
        ("placeholder_hidden", "mean", "shared, shared_fused, per_depth"),
        ("placeholder_token", "shared", "mask, frozen, last_token"),
        ("placeholder_hidden", None, "shared, shared_fused"),
        ("placeholder_token", 3, "mask, frozen"),
        ("placeholder_hidden", ["shared"], "shared, shared_fused"),
    ],
)
def test_a_design_that_nobody_knows(key, value, known, tmp_path):
    write_run(of_model(tiny.head(**SHAPE)), tiny.head(**SHAPE), tmp_path)
    edited(tmp_path, **{key: value})
    with pytest.raises(InputError) as error:
        read_run(tmp_path)
    assert str(error.value).startswith(
        f"{tmp_path / 'head.json'}: {key} must be one of {known}"
    ) and f"; got {value}; " in str(error.value)


def test_a_run_of_another_design_than_its_checkpoint(tmp_path):
    """head.json says gated, the checkpoint has no gate."""
    write_run(of_model(tiny.head(**SHAPE)), tiny.head(**SHAPE), tmp_path)
    edited(tmp_path, placeholder_hidden="gated")
    with pytest.raises(
        InputError,
        match=r"must hold the parameters of head.json; got a difference at placeholder.gate",
    ):
        read_run(tmp_path)


@pytest.mark.parametrize("side", ["hidden", "token"])
def test_the_documents_say_what_happens(side):
    """docs/checkpoints.md, "Other placeholders than the paper's": every design, and the first word of what becomes of it."""
    known = {"hidden": HIDDEN_DESIGNS, "token": TOKEN_DESIGNS}[side]
    rows = [
        line.split("|")
        for line in (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text().splitlines()
        if f"| {side} |" in line
    ]
    said = {name: row[3] for row in rows for name in known if f"`{name}`" in row[2]}
    assert said.keys() == known.keys()
    for name, words in said.items():
        happens = export_placeholders.how(tiny.head_config(**{f"placeholder_{side}": name}))
        assert words.split()[0].rstrip(":") == happens.split(":")[0].split()[0], name
