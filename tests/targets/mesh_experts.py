"""A mixture of experts on eight devices, beside that on one: for tests/targets/test_sharding.py.

python mesh_experts.py DATA FSDP MODEL
"""

import os
import re
import sys

FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from peagle_jax.kernels import experts as forms  # noqa: E402
from peagle_jax.layers.moe import GLU, Experts  # noqa: E402
from peagle_jax.train.mesh import make_training_mesh  # noqa: E402
from peagle_jax.train.recipe_sections import MeshConfig  # noqa: E402

B, T, D, E, K = 8, 6, 16, 8, 2
sizes = dict(zip(("data", "fsdp", "model"), map(int, sys.argv[1:]), strict=True))
mesh = make_training_mesh(MeshConfig(**sizes))
assert mesh is not None
module = Experts(
    E, D, 24, GLU(jax.nn.silu), bias=True, packed=False, dtype=np.float32, rngs=nnx.Rngs(3)
)
graph, state = nnx.split(module)
rng = np.random.default_rng(0)
x = rng.normal(size=(B, T, D)).astype(np.float32)
ids = rng.permuted(np.tile(np.arange(E), (B * T, 1)), axis=1)[:, :K].astype(np.int32)
shares = rng.random((B * T, K)).astype(np.float32)


def run(state, x, ids, shares):
    return nnx.merge(graph, state)(x, ids, shares)


rows = []
for form in ("looped", "grouped"):
    forms.choose = lambda *args, name=form: name
    want = jax.jit(run)(state, x, ids, shares)
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, P(("data", "fsdp")))
        divided = [jax.device_put(value, spread) for value in (x, ids, shares)]
        compiled = jax.jit(run).lower(state, *divided).compile()
        got = compiled(state, *divided)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    # the most rows that any array of one device has
    rows.append(max(int(n) for n in re.findall(rf"f32\[(\d+),{D}\]", compiled.as_text())))
print(rows)
