"""Tests that `make test` leaves to `make test-all`, by node id, each with what it costs.

Seconds are of one run on two cores with a warm compilation cache (docs/testing.md). A test belongs
here when it costs more than a few seconds and `make test` keeps another one for the same promise.
"""

import fnmatch

SLOW: dict[str, str] = {
    "tests/experiments/test_run.py*": "130 s: whole experiments; `.ci/run` runs two as well",
    "tests/experiments/test_code_keys.py::test_what_cannot_change*": "45 s: nine keys of all code",
    "tests/kernels/test_compiled.py*": "135 s: machine code of 180 launches",
    "tests/kernels/test_whole_models.py*": "80 s: every kernel of a model, interpreted",
    "tests/kernels/test_suite_numerics.py::test_kernels_are_right[[]e*": "12 s",
    "tests/kernels/test_suite_numerics.py::test_kernels_are_right[[]topk*": "4 s",
    "tests/kernels/test_suite_numerics.py::test_kernels_are_right[[]p*": "4 s",
    "tests/kernels/test_suite_numerics.py::test_kernels_are_right[[]d*": "3 s",
    "tests/kernels/test_packed_attention.py::test_forward_and_backward[[]o*": "5 s",
    "tests/kernels/test_packed_attention.py::test_forward_and_backward[[]a window*": "10 s",
    "tests/kernels/test_packed_attention.py::test_forward_and_backward[[]no*": "3 s",
    "tests/kernels/test_packed_attention.py::test_keys_that_nobody_sees*": "4 s",
    "tests/kernels/test_choose.py::test_precision_is_never_taken_away": "4 s",
    "tests/test_gpu_suite.py::test_dry_run": "40 s: the GPU suite on tiny shapes",
    "tests/decode/test_sampling.py::test_distribution[[]k4_*": "40 s; [k4] is kept",
    "tests/decode/test_sampling.py::test_distribution[[]k1*": "13 s",
    "tests/decode/test_sampling.py::test_wrong_rules*always*": "6 s; no_residual is kept",
    "tests/decode/test_lossless.py::test_defaults": "4 s",
    "tests/decode/test_lossless.py::test_real_heads*16[]]": "4 s; K = 6 is kept",
    "tests/decode/test_fp8_decoding.py::*gpt_oss*": "5 s; Qwen3 is kept",
    "tests/train/test_runs.py::test_killed_run*": "35 s: a run and two that are killed",
    "tests/train/test_runs.py::test_a_run_begun_with_former*": "8 s",
    "tests/train/test_runs.py::test_growing_depths*": "5 s",
    "tests/train/test_runs.py::test_a_run_is_not_continued*": "5 s",
    "tests/train/test_runs.py::test_a_resumed_target*": "4 s",
    "tests/train/test_runs.py::test_frozen_parts*": "4 s",
    "tests/train/test_losses_of_rows.py::*[[]peagle*": "5 s; EAGLE-3 is kept",
    "tests/train/test_attention.py::test_equals_dense[[]16-None[]]": "9 s; with a window is kept",
    "tests/train/test_attention.py::test_equals_dense[[]2048*": "3 s",
    "tests/pipelines/test_demo.py*": "60 s: whole demos; `.ci/run` runs one as well",
    "tests/pipelines/test_stored_training.py::*[[]peagle-6[]]": "5 s",
    "tests/pipelines/test_stored_training.py::test_a_design_that*": "3 s",
    "tests/pipelines/test_tracing.py::test_lowered*": "6 s: a program for eight devices",
    "tests/pipelines/test_tracing.py::test_recipes[[]g*": "6 s; Qwen3-Coder is kept",
    "tests/pipelines/test_tracing.py::test_full_size[[]g*": "8 s; Llama and Qwen3 are kept",
    "tests/pipelines/test_assets.py::test_transformers*": "4 s",
    "tests/pipelines/test_assets.py::test_heads_fit*[[]peagle*": "3 s; EAGLE-3 is kept",
    "tests/targets/test_sharding.py::test_two_processes": "9 s; eight devices are kept",
    "tests/peers/test_matrix.py*": "20 s: 27 heads of every option",
    "tests/checkpoints/test_round_trips.py::test_round_trips[[]1*": "15 s",
    "tests/checkpoints/test_old_files.py::test_state_of_a_target*": "5 s",
    "tests/cli/test_decode_commands.py::test_bench*": "5 s",
    "tests/cli/test_decode_commands.py::test_generate_in_fp8": "3 s",
}


def is_slow(node_id: str) -> bool:
    """Whether a pattern of SLOW (fnmatch's, in which [[] is a bracket) covers a test."""
    return any(fnmatch.fnmatchcase(node_id, pattern) for pattern in SLOW)
