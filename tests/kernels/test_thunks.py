"""What is counted in programs that XLA compiled for a GPU, on texts of such programs."""

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts" / "gpu")]
import compile_ahead  # noqa: E402
import thunks  # noqa: E402

LISTING = """\
001: kCopy  [source       | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source        | next=006 (2)  ] loop_add_fusion grid: [1, 1, 1]
        005: kCustomCall   [source        | sink          ] kCustomCall
    006: kCustomCall [source | sink] kCustomCall
    000: kCommandBuffer [source | sink]
        007: kCustomKernel [source | sink] fusion grid: [1, 1, 1]
"""
PROGRAM = """\
HloModule jit_step

ENTRY %main (x: f32[2]) -> f32[2] {
  %a = f32[2]{0} custom-call(%x), custom_call_target="NAME", api_version=API_VERSION_TYPED_FFI
  %b = f32[2]{0} custom-call(%a), custom_call_target="NAME"
  %c = f32[2]{0} custom-call(%a), custom_call_target="__cublas$gemm"
  ROOT %d = f32[2]{0} fusion(%b), kind=kLoop
}
"""


def test_thunks_and_their_graphs():
    found = [(thunk.kind, thunk.graph) for thunk in thunks.read(LISTING)]
    outside = [("Copy", None), ("While", None), ("CustomKernel", None)]
    inside = [("CustomKernel", 0), ("CustomCall", 0), ("CustomCall", None), ("CustomKernel", 1)]
    assert found == outside + inside


def test_thunks_of_a_loop_end_with_it():
    """Also where what follows stands in a graph, and so deeper than the loop."""
    after = """\
000: kCommandBuffer [source | sink]
    008: kCopy [source | sink] kCopy
"""
    listed = thunks.read(LISTING + after)
    assert [thunk.in_loop for thunk in listed] == 2 * [False] + 5 * [True] + [False]
    assert listed[-1].graph == 2


@pytest.mark.parametrize("name", ["triton_kernel_call", "triton_kernel_call_ffi"])
def test_triton_calls_by_both_names(name):
    """jax-triton 0.3's and 0.4's."""
    counts = compile_ahead.counts(PROGRAM.replace("NAME", name))
    assert counts == {"triton": 2, "launches": 4, "loops": 0}


def test_rows_of_other_programs_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert compile_ahead.merged(path, [{"program": "a", "kernels": True}])
    old = [{"program": name, "kernels": True, "triton": 1} for name in "ab"]
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    new = [{"program": "a", "kernels": kernels, "triton": 2} for kernels in (True, False)]
    assert compile_ahead.merged(path, new) == [new[0], old[1], new[1]]
