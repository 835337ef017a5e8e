"""Traces whole training steps of recipes on eight simulated devices: python whole_steps.py RECIPE..

Prints a line of JSON for each.
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax  # noqa: E402

from peagle_jax.pipelines import training_plan  # noqa: E402
from peagle_jax.pipelines.tracing import recipe  # noqa: E402
from peagle_jax.pipelines.training_tracing import abstract_step  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"


def described(tree) -> list:
    return [(list(x.shape), str(x.dtype)) for x in jax.tree.leaves(tree)]


def main() -> None:
    for name in sys.argv[1:]:
        run, target, _ = recipe(CONFIGS / "train" / f"{name}.yaml", CONFIGS / "targets")
        plan = training_plan.training_plan(run, None, CONFIGS / "targets")
        step = abstract_step(run, training_plan.find_config(run.target, CONFIGS / "targets"))
        lowered = step.lower()
        new_state, metrics = lowered.out_info
        # residual streams of the target, by their rows
        stream = rf"tensor<(\d+)x{run.data.seq_len}x{target.config.dim}xbf16>"
        row = {
            "bytes": step.bytes_on_a_device(),
            "planned_bytes": plan.target_bytes + plan.head_bytes + plan.optimizer_bytes,
            "rows": sorted({int(rows) for rows in re.findall(stream, lowered.as_text())}),
            "planned_rows": run.data.batch_size // run.gradient_accumulation,
            "state_is_kept": described(new_state) == described(step.state),
            "metrics": {key: described(x) for key, x in metrics.items() if key != "grad_norms"},
            "num_depths": run.num_depths,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
