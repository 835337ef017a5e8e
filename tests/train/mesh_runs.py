"""Runs `peagle train` with each recipe in one process: for tests/train/test_mesh.py.

python mesh_runs.py RECIPE... [-- OPTION...]
"""

import sys

from peagle_jax.cli import main

words = sys.argv[1:]
recipes, options = words, []
if "--" in words:
    recipes, options = words[: words.index("--")], words[words.index("--") + 1 :]
for recipe in recipes:
    if code := main(["train", recipe, *options]):
        sys.exit(code)
