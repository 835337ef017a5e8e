"""Lowers every kernel through `on_gpu` for an H200 that is not here, and prints its calls as JSON.

    PYTHONPATH=scripts/gpu python tests/kernels/lower_kernels.py

jax-triton compiles each kernel to PTX on the way. It needs an environment of
`scripts/gpu/install_cuda.sh ENV compiling`.
"""

import json
import re

import kernel_cases

from peagle_jax.kernels.launch import H200, Launch, on_gpu, target_gpu

CALL = re.compile(r"custom_call @triton_kernel_call\w*\(")
ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


def calls(case: kernel_cases.Case) -> list[dict]:
    """Each Triton call of a lowered case, in order.

    Returns:
      The kernel's `function`; how many `outputs` the call has; its `aliases`, which are
      [operand, output].
    """
    launches: list[Launch] = []

    def start(launch):
        launches.append(launch)
        return on_gpu(launch)

    with target_gpu(H200):
        text = case.lower(start)
    lines = [line for line in text.splitlines() if CALL.search(line)]
    return [
        {
            "function": launch.kernel.__name__,
            "outputs": len(launch.outputs),
            "aliases": sorted([int(i), int(o or 0)] for o, i in ALIAS.findall(line)),
        }
        for launch, line in zip(launches, lines, strict=True)
    ]


def main() -> None:
    print(json.dumps({name: calls(case) for name, case in kernel_cases.CASES.items()}))


if __name__ == "__main__":
    main()
