"""Real vLLM (CPU) on lists of token ids: runs in the environment of install_vllm.sh.

    ENV/bin/python scripts/peers/vllm_generate.py JOBS.json OUT.jsonl

JOBS: a list of {"target", "drafter" or null, "k", "parallel", "method" ("eagle3" without it),
  "prompts": [[ids]], "max_new_tokens", "alone"}. With `alone`, vLLM gets nothing but the drafter's
  folder, as in `vllm serve FOLDER`, and finds target, method and K in it.
OUT: a line for each job, as soon as it is done: {"outputs", "num_drafts", "num_draft_tokens",
  "num_accepted_tokens", "num_accepted_per_pos", "seconds"}, or {"error"}; and "version", vLLM's.

One process does all jobs: importing vLLM takes longer than a job.
"""

import gc
import json
import os
import sys
import time
import traceback

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# vLLM knows a CPU build by its version; that of VLLM_PYTHON (install_vllm.sh) does not say "cpu"
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def count(llm) -> dict:
    """vLLM's counters of speculative decoding, since the process began."""
    metrics = {
        m.name.removeprefix("vllm:spec_decode_"): m
        for m in llm.get_metrics()
        if m.name.startswith("vllm:spec_decode_")
    }
    per_position = metrics.get("num_accepted_tokens_per_pos")
    return {name: metrics[name].value if name in metrics else 0 for name in COUNTERS} | {
        "num_accepted_per_pos": list(per_position.values) if per_position else []
    }


def run(job: dict) -> dict:
    """Decodes the prompts of one job in an engine of its own."""
    speculative = None
    if job["drafter"] and not job.get("alone"):
        speculative = {
            "method": job.get("method", "eagle3"),
            "model": job["drafter"],
            "num_speculative_tokens": job["k"],
        }
        speculative["parallel_drafting"] = job["parallel"]
    llm = LLM(
        model=job["drafter"] if job.get("alone") else job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        disable_log_stats=False,
        max_model_len=max(map(len, job["prompts"])) + job["max_new_tokens"] + 64,
        speculative_config=speculative,
    )
    before = count(llm)  # counters belong to the process, not to the engine
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    start = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    result = {
        "outputs": [list(a.outputs[0].token_ids) for a in answers],
        "seconds": time.perf_counter() - start,
    }
    after = count(llm)
    for name in COUNTERS:
        result[name] = after[name] - before[name]
    earlier = before["num_accepted_per_pos"] + [0] * len(after["num_accepted_per_pos"])
    result["num_accepted_per_pos"] = [
        a - b for a, b in zip(after["num_accepted_per_pos"], earlier, strict=False)
    ]
    del llm
    return result


def main(jobs_file: str, out_file: str) -> None:
    with open(jobs_file) as file:
        jobs = json.load(file)
    with open(out_file, "w") as out:
        for job in jobs:
            try:
                result = run(job)
            except Exception as error:
                # a head that vLLM refuses is a result, not the end of the other jobs
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(result | {"version": vllm.__version__}) + "\n")
            out.flush()
            gc.collect()
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
