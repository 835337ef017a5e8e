"""The size of every published target on 1 and 8 devices, by arithmetic from traced shapes: docs/sizes.md. Allocates nothing.

    .venv/bin/python scripts/size_table.py --out docs/sizes.md [--cuda] [--only gpt-oss-20b]

Every configuration of configs/targets is built at its full size with `jax.eval_shape`, and its prefill and one K = 7 step with a P-EAGLE head are
lowered for 1 and 8 devices. `--cuda` also compiles the step ahead of time for an H200 (needs the CUDA plugin's wheel, no GPU) and adds its peak of
temporary memory; a CPU's own analysis is of no use for bfloat16, of which it makes float32 copies.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before jax starts

import argparse  # noqa: E402
import json  # noqa: E402
from pathlib import Path  # noqa: E402

from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from peagle_jax.files import write_whole  # noqa: E402
from peagle_jax.origin import versions  # noqa: E402
