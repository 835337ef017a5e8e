"""Runs recipes in one process: `python mesh_runs.py RECIPE...`, for tests/train/test_mesh.py.

With ADDRESS in the environment it is one of the processes that run them together.
"""

import os
import sys

import jax

if os.environ.get("ADDRESS"):
    number = int(os.environ["NUMBER"])
    jax.distributed.initialize(os.environ["ADDRESS"], num_processes=2, process_id=number)

from peagle_jax.cli import main  # noqa: E402

for recipe in sys.argv[1:]:
    if code := main(["train", recipe]):
        sys.exit(code)
