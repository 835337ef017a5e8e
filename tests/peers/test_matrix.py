"""Real vLLM and speculators on heads of every option (scripts/peers/check_matrix.py): the whole matrix. CI runs a cut of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
VLLM, SPECULATORS = ROOT / ".venv-vllm", ROOT / ".venv-speculators"


@pytest.mark.long
def test_every_head_is_accepted(tmp_path):
    if missing := [env.name for env in (VLLM, SPECULATORS) if not (env / "bin/python").exists()]:
        pytest.skip(f"{', '.join(missing)}: make test-long installs them")
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts/peers/check_matrix.py",
            "--vllm",
            VLLM,
            "--speculators",
            SPECULATORS,
            "--out",
            tmp_path / "matrix",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4000:]


def test_the_matrix_covers_what_it_should():
    """Every option of a head, both layouts, every route and every dtype; the table in results/ is of these heads."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import check_matrix
    import matrix_heads

    configs = {name: matrix_heads.make(name).config for name in matrix_heads.HEADS}
    assert len(configs) >= 12
    options = (
        "qk_norm",
        "attention_bias",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "parallel",
    )
    for option in options:
        assert {bool(getattr(c, option)) for c in configs.values()} == {True, False}, option

    def kinds(key):
        return {key(c) for c in configs.values()}

    assert len(kinds(lambda c: c.rope.source)) == 4 and kinds(
        lambda c: c.draft_vocab < c.vocab
    ) == kinds(lambda c: any(c.windows)) == {True, False}
    assert kinds(lambda c: len(c.aux_hidden_state_layers)) == {3, 4} and kinds(
        lambda c: c.dim == c.target_dim
    ) == {True, False}
    assert kinds(lambda c: c.heads * c.head_dim == c.dim) == {True, False} and kinds(
        lambda c: c.layers
    ) == {1, 2, 4}
    routes = [check_matrix.ROUTES.get(name, ("orbax", "float32", None)) for name in configs]
    assert {r[0] for r in routes} == {"orbax", "automodel", "specforge", "fp8"} and {
        r[1] for r in routes
    } == {"float32", "bfloat16", "float16"}
    assert {r[2] is None for r in routes} == {
        True,
        False,
    } and not check_matrix.ROUTES.keys() - configs.keys()
