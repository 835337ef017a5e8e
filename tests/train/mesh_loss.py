"""The loss of a batch on eight devices, beside that on one: for tests/train/test_mesh.py.

python mesh_loss.py DATA FSDP MODEL
"""

import os
import re
import sys

FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from peagle_jax.train import loss  # noqa: E402
from peagle_jax.train.mesh import make_training_mesh  # noqa: E402
from peagle_jax.train.recipe_sections import MeshConfig  # noqa: E402

B, N, D, V, K = 8, 24, 12, 32, 3
loss.CHUNK = N  # elements of one sequence
sizes = dict(zip(("data", "fsdp", "model"), map(int, sys.argv[1:]), strict=True))
mesh = make_training_mesh(MeshConfig(**sizes))
assert mesh is not None
rng = np.random.default_rng(0)
hidden, teacher_hidden = rng.normal(size=(2, B, N, D)).astype(np.float32)
output, teacher_output = rng.normal(size=(2, D, V)).astype(np.float32)
teacher_row = (rng.integers(0, N, (B, N)) + N * np.arange(B)[:, None]).astype(np.int32)
weight, depth = rng.random((B, N)).astype(np.float32), rng.integers(0, K, (B, N), np.int32)


def loss_and_gradients(matrices, rows):
    def of(output, hidden):
        flat = [x.reshape(B * N, *x.shape[2:]) for x in (hidden, *rows[1:])]
        hidden, teacher_hidden, teacher_row, weight, depth = flat
        rest = matrices[1], teacher_hidden, teacher_row, weight, depth, K
        return loss.distill(lambda h: h, output, hidden, *rest, batch_size=B)

    return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(matrices[0], rows[0])


matrices = output, teacher_output
rows = hidden, teacher_hidden, teacher_row, weight, depth
alone = jax.jit(loss_and_gradients).lower(matrices, rows).compile()
with jax.set_mesh(mesh):
    of_matrices, of_rows = (
        NamedSharding(mesh, p) for p in (P("fsdp", "model"), P(("data", "fsdp")))
    )
    matrices = tuple(jax.device_put(x, of_matrices) for x in matrices)
    rows = tuple(jax.device_put(x, of_rows) for x in rows)
    together = jax.jit(loss_and_gradients).lower(matrices, rows).compile()
    got = together(matrices, rows)
want = alone(tuple(map(np.asarray, matrices)), tuple(map(np.asarray, rows)))
for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
loops = [re.findall(r'known_trip_count":\{"n":"(\d+)"', x.as_text()) for x in (alone, together)]
print([list(map(int, x)) for x in loops])
