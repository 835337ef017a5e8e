"""Which form of a kernel runs: by name, by what is here, by what the operands are."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from peagle_jax.kernels import (
    attention,
    choose,
    fp8_matmul,
    fusion,
    launch,
    packed_attention,
    vocab,
)
from peagle_jax.types import InputError

FORMS = ("reference", "triton", "mosaic")


@pytest.fixture
def hopper(monkeypatch):
    """As if an H200 with jax-triton were here."""
    monkeypatch.setattr(choose, "unavailable_reason", lambda form: None)
    monkeypatch.setattr(launch, "platform", lambda: "gpu")
    monkeypatch.setattr(choose, "_reported", set())
    monkeypatch.setattr(launch, "untried_versions", lambda: None)


def test_auto_takes_triton_where_it_can(hopper, caplog):
    """One line says so, and one more for each reason why it cannot."""
    with caplog.at_level(logging.INFO):
        assert [choose.choose("k", "auto", FORMS) for _ in range(3)] == ["triton"] * 3
        for kernel in ("k", "another"):
            assert choose.choose(kernel, "auto", FORMS, "they are tired") == "reference"
    assert [r.message for r in caplog.records] == [
        "kernels: Triton",
        "kernels: plain JAX for k; of Triton kernels: they are tired",
    ]
    assert choose.choose("k", "mosaic", FORMS) == "mosaic"
    assert choose.choose("k", "reference", FORMS, "x") == "reference"


def test_a_named_form_that_cannot_serve_is_an_error(hopper):
    with pytest.raises(
        InputError,
        match="kernel k: mosaic kernels cannot run: they are tired; got mosaic; "
        "ask for auto or reference",
    ):
        choose.choose("k", "mosaic", FORMS, "they are tired")
    with pytest.raises(
        InputError, match="must be auto or one of reference, triton, mosaic; got cutlass"
    ):
        choose.choose("k", "cutlass", FORMS)


def test_on_a_cpu_it_is_the_reference_and_nothing_is_said(caplog):
    with caplog.at_level(logging.INFO):
        assert choose.choose("k", "auto", FORMS) == "reference"
    assert not [record for record in caplog.records if record.name.startswith("peagle_jax")]
    for form in ("triton", "mosaic"):
        assert launch.unavailable_reason(form) == "they need a GPU, and JAX runs on cpu"


def test_where_it_is_only_compiled_for_a_gpu(monkeypatch):
    """A default device that is not here, as ahead-of-time compilation has it."""
    monkeypatch.setattr(launch, "platform", lambda: "gpu")
    for form in ("triton", "mosaic"):
        assert (
            launch.unavailable_reason(form)
            == "they need a GPU, and this machine only compiles for one"
        )
    with launch.target_gpu(launch.H200):
        assert launch.unavailable_reason("mosaic") is None
        assert launch.unavailable_reason("triton") == "TRITON_INTERPRET is set"
    with launch.target_gpu(launch.Gpu(80, 108)):
        assert "and this GPU has compute capability 8.0" in launch.unavailable_reason("triton")


def test_precision_is_never_taken_away(hopper, monkeypatch):
    """float32 operands stay with the reference: a tensor core would cut them to 10 bits."""
    asked = []
    for module in (attention, packed_attention, fusion, vocab, fp8_matmul):
        monkeypatch.setattr(
            module, "choose", lambda *args, **_: asked.append(choose.choose(*args)) or "reference"
        )
    for kernel in (attention.step_attention, packed_attention.packed_attention_native):
        monkeypatch.setattr(kernel, "can_attend", lambda *_: False)  # as on a GPU
    f, b = jnp.ones((1, 2, 2, 16)), jnp.ones((1, 2, 2, 16), jnp.bfloat16)
    at, rule = jnp.zeros((1, 2), jnp.int32), dict(window=None, scale=1.0, sinks=None)

    def swap(x):
        return x.swapaxes(1, 2)

    intervals = packed_attention.AttentionIntervals(at, at, at, 2, 0)
    for x in (f, b):
        attention.attend(x, swap(x), swap(x), at, None, form="auto", **rule)
        packed_attention.attend(x, x, x, intervals, 1.0, form="auto")
        fusion.fuse([x[0, :, 0]], x[0, 0].T.repeat(1, 1), None, "none", 1.0, form="auto")
        vocab.topk(x[0, :, 0], x[0, 0].T, 1, form="auto")
    assert asked == ["reference"] * 4 + ["triton"] * 4
    attention.attend(b, swap(f), swap(f), at, None, form="auto", **rule)
    scale = jnp.ones((1, 2, 2))
    attention.attend(
        b,
        swap(f).astype(fp8_matmul.E4M3),
        swap(f).astype(fp8_matmul.E4M3),
        at,
        None,
        form="auto",
        k_scale=scale,
        v_scale=scale,
        **rule,
    )
    assert asked[8:] == ["reference", "triton"]


def test_what_kernels_were_not_made_for(hopper):
    wide = jnp.ones((1, 2, 2, 256), jnp.bfloat16)
    at = jnp.zeros((1, 2), jnp.int32)
    intervals = packed_attention.AttentionIntervals(at, at, at, 2, 0)
    assert "up to 128, and these have 256" in packed_attention.unsupported(*[wide] * 3, intervals)
    ahead = dataclasses.replace(intervals, chain_ahead=at)
    narrow = [wide[..., :64]] * 3
    assert packed_attention.unsupported(*narrow, intervals) is None
    assert "no bidirectional chains" in packed_attention.unsupported(*narrow, ahead)
    w = fp8_matmul.quantize(jnp.ones((64, 100)))
    with pytest.raises(InputError, match="K in 128s, and this product is 3 x 64 x 100"):
        fp8_matmul.matmul(jnp.ones((3, 100), jnp.bfloat16), w, "mosaic")
    with pytest.raises(InputError, match="one scale a row, not blocks"):
        fp8_matmul.matmul(
            jnp.ones((3, 128), jnp.bfloat16),
            fp8_matmul.quantize(jnp.ones((64, 128)), blocks=True),
            "mosaic",
        )


def test_not_on_a_mesh(hopper, monkeypatch):
    class Mesh:
        empty, size = False, 8

    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: Mesh)
    assert choose.choose("k", "auto", FORMS) == "reference"
    with pytest.raises(InputError, match="they run on one device, and this runs on 8"):
        choose.choose("k", "triton", FORMS)


@pytest.mark.parametrize(
    "version, reason",
    [
        ("0.4.1", None),
        ("0.10.0", None),
        ("0.3.1", "they need jax-triton 0.4, and this is 0.3.1"),
    ],
)
def test_a_version_that_fails(version, reason):
    """A reason at the start, and no error when the first kernel is traced."""
    assert launch.too_old(version) == reason


def test_the_rule_for_dead_code_of_jax_triton():
    """jax 0.11 calls it with two arguments, and jax 0.12 with three."""

    def rule(used, equation):
        return used, equation

    adapted = launch.with_any_arguments(rule)
    assert adapted("used", "equation") == ("used", "equation")
    assert adapted("used", "read later", "equation") == ("used", "equation")
    assert launch.with_any_arguments(adapted) is adapted


def test_a_rule_that_knows_the_third_argument_is_left_alone():
    def rule(used, read_later, equation):
        return used, read_later, equation

    assert launch.with_any_arguments(rule) is rule


@pytest.mark.parametrize(
    "jax_version, triton, warning",
    [
        ("0.11.2", "3.9.7", []),
        ("0.11.2", "3.6.0", []),
        ("0.12.0.1", "3.9.0", []),
        (
            "0.11.2",
            "3.60.0",
            [
                "kernels: jax 0.11.2, jax-triton 0.4.1, triton 3.60.0 were not tried together; "
                "use jax 0.12.0.1, jax-triton 0.4.1, triton 3.9 or jax 0.11.2, jax-triton 0.4.1, "
                "triton 3.9 or jax 0.11.2, jax-triton 0.4.1, triton 3.6"
            ],
        ),
    ],
)
def test_versions_that_nobody_tried_are_named_once(
    caplog, monkeypatch, jax_version, triton, warning
):
    monkeypatch.setattr(choose, "unavailable_reason", lambda form: None)
    monkeypatch.setattr(launch, "platform", lambda: "gpu")
    monkeypatch.setattr(choose, "_reported", set())
    versions = {"jax": jax_version, "jax-triton": "0.4.1", "triton": triton}
    monkeypatch.setattr(launch.importlib.metadata, "version", versions.__getitem__)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            choose.choose("k", "auto", FORMS)
    assert [r.message for r in caplog.records] == ["kernels: Triton", *warning]
