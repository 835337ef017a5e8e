"""Runs commands in one process of several devices: for test_several_devices.py.

python several_devices.py '[["extract", ...], ...]'

The last line that it prints has, for each command, the mesh of its target, and how many rows of
the last batch each device had.
"""

import json
import sys

from peagle_jax.cli import main
from peagle_jax.pipelines import extract
from peagle_jax.targets import sharding

seen: dict = {}
placement, put_rows = sharding.placement, extract.put_rows


def noting_placement(config, mesh):
    seen["mesh"] = dict(mesh.shape)
    return placement(config, mesh)


def noting_rows(batch, mesh):
    placed = put_rows(batch, mesh)
    if mesh is not None:
        seen["rows"] = placed[0].sharding.shard_shape(placed[0].shape)[0]
    return placed


sharding.placement, extract.put_rows = noting_placement, noting_rows
results = []
for words in json.loads(sys.argv[1]):
    seen.clear()
    if code := main(words):
        sys.exit(code)
    results.append(dict(seen))
print(json.dumps(results))
