"""Machine code of every Triton kernel for Hopper, Blackwell and the RTX PRO.

FP8 products are FP8 instructions, nothing spills, and shared memory suffices.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is a wheel for Linux")
ROOT = Path(__file__).parent.parent.parent
FP8 = {90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}
# a few numbers a thread
SMALL = ("merge_kernel", "sort_kernel", "quantize_kernel", "product_kernel", "choice_kernel")
# without a loop over tiles: everything is asked for at once
AT_ONCE = ("cache writing", "rotating", "gemv")
AT_ONCE += ("experts, 1 token of 8, float8", "experts, 8 tokens of 8, float8")
# products with one scale a row
BY_ROW = [f"fp8_matmul {M}x4096x4096" for M in (8, 64, 512)]
WIDE = {90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}  # bfloat16, of a tile of 64 rows and more


# each architecture takes a minute or two
@pytest.fixture(
    scope="module",
    params=[
        90,
        pytest.param(100, marks=pytest.mark.long),
        pytest.param(120, marks=pytest.mark.long),
    ],
)
def sm(request):
    return request.param


@pytest.fixture(scope="module")
def rows(sm, tmp_path_factory):
    out = tmp_path_factory.mktemp("compiled") / "rows.jsonl"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(Path.home() / ".cache" / "peagle_jax" / "triton"),
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "gpu" / "compile_kernels.py",
            "--sm",
            str(sm),
            "--out",
            out,
        ],
        env=env,
        check=True,
        capture_output=True,
        timeout=900,
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_all_of_them(rows, sm):
    names = {row["kernel"] for row in rows}
    functions = {row["function"] for row in rows}
    assert {row["sm"] for row in rows} == {sm} and len(names) >= 20
    packed = {"forward_kernel", "query_kernel", "key_kernel"}
    gemv = {"gemv_kernel", "joint_gemv_kernel", "expert_gemv_kernel"}
    others = {"attention", "expert", "fp8", "fusion", "rotate", "write", "joint", "topk"}
    others = {f"{name}_kernel" for name in others} | {*SMALL}
    assert functions == others | packed | gemv


def test_nothing_spills_and_everything_fits(rows, sm):
    bad = [
        row
        for row in rows
        # a stack that is neither written nor read is reserved alone
        if {"STL", "LDL"} & set(row["instructions"])
        or row["shared"] > row["shared_limit"]
        or row["tensor_memory"] > 512
    ]
    assert any(row["tensor_memory"] for row in rows) == (sm == 100)
    assert not bad, [
        (row["kernel"], row["function"], row["sm"], row["stack"], row["shared"]) for row in bad
    ]
    # several blocks a multiprocessor hide each other's waiting
    small = [row for row in rows if row["kernel"].startswith("fp8_matmul 8x")]
    assert small and all(row["registers"] <= 64 for row in small)


def test_loads_run_ahead(rows):
    """Without asynchronous loads a kernel waits for memory at every tile."""
    selected = [
        row
        for row in rows
        if row["function"] not in SMALL and not row["kernel"].startswith(AT_ONCE)
    ]
    assert not [row["kernel"] for row in selected if not row["instructions"].get("LDGSTS")]


def test_stored_numbers_are_decoded_without_conversions(rows):
    """F2F, one for each number: a multiprocessor starts fewer of them a clock than of others."""
    names = ("float8", "MXFP4")
    selected = [row for row in rows if any(name in row["kernel"] for name in names)]
    assert len(selected) >= 15
    assert not [row["kernel"] for row in selected if row["instructions"].get("F2F")]


def test_loops_that_decode_are_short(rows, sm):
    """Instructions of a thread for each number that it decodes; before, MXFP4 took 10.1."""
    if sm != 90:
        pytest.skip("counted for Hopper")
    loops: dict[str, int] = {}
    for row in rows:
        if row["function"] == "expert_kernel":
            loops[row["kernel"]] = max(row["loop"], loops.get(row["kernel"], 0))
    # numbers of a thread: of 256 and of 128 inputs, of 64 outputs, and of 64 for gate and for up
    assert loops["experts, 8 tokens of 4, MXFP4"] <= 4.5 * 256 * 64 / 128
    assert loops["experts, 64 tokens of 8, float8 blocks"] <= 5 * 128 * 128 / 128


def test_fp8_products_are_done_in_fp8(rows):
    selected = [
        row
        for row in rows
        if row["kernel"].startswith("fp8_matmul ")
        or "fusion" in row["kernel"]
        and "float8" in row["kernel"]
    ]
    assert len(selected) == 8
    for row in selected:
        counts = row["instructions"]
        assert counts.get(FP8[row["sm"]]) and "HMMA" not in counts, row
        # Hopper's own sums keep few bits; with scales of groups they end after 128 anyway
        if row["sm"] == 90 and row["kernel"] in BY_ROW:
            assert row["imprecise_sums"] == [128], row
        # nothing is unpacked, and only those that are given wider numbers quantize
        is_wide = "bfloat16 in" in row["kernel"] or "float32 in" in row["kernel"]
        assert counts.get("F2FP.E4M3", 0) == 0 or is_wide, row


def test_wide_tiles_use_wide_instructions(rows):
    selected = [row for row in rows if row["kernel"].startswith("packed attention")]
    assert selected and all(row["instructions"].get(WIDE[row["sm"]]) for row in selected)
