"""Real vLLM and speculators on heads of every option (scripts/peers/check_matrix.py).

This is the whole matrix; CI runs a part of it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
VLLM, SPECULATORS = ROOT / ".venv-vllm", ROOT / ".venv-speculators"


@pytest.mark.peer
def test_every_head_is_accepted(tmp_path):
    if missing := [env.name for env in (VLLM, SPECULATORS) if not (env / "bin/python").exists()]:
        pytest.skip(f"{', '.join(missing)}: make test-peers installs them")
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
    """Every option of a head, both formats, every route and every dtype."""
    sys.path.insert(0, str(ROOT / "scripts" / "peers"))
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

    def values(key):
        return {key(c) for c in configs.values()}

    both = {True, False}
    assert len(values(lambda c: c.rope.source)) == 4
    assert values(lambda c: c.draft_vocab < c.vocab) == both
    assert values(lambda c: any(c.windows)) == both
    assert values(lambda c: len(c.aux_hidden_state_layers)) == {3, 4}
    assert values(lambda c: c.dim == c.target_dim) == both
    assert values(lambda c: c.heads * c.head_dim == c.dim) == both
    assert values(lambda c: c.layers) == {1, 2, 4}
    routes = [check_matrix.ROUTES.get(name, ("orbax", "float32", None)) for name in configs]
    assert {route for route, _, _ in routes} == {"orbax", *matrix_heads.WRITERS}
    assert {dtype for _, dtype, _ in routes} == {"float32", "bfloat16", "float16"}
    assert {shard is None for _, _, shard in routes} == both
    assert not check_matrix.ROUTES.keys() - configs.keys()
    assert matrix_heads.WRITERS.keys() == {"automodel", "specforge", "fp8"}
