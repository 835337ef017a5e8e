"""Greedy generation by real vLLM, with its own speculative counters; runs in the environment of install_vllm.sh.

    ENV/bin/python scripts/vllm_generate.py JOB.json OUT.json

JOB: {"target", "drafter" or null, "k", "parallel", "prompts": [[ids]], "max_new_tokens"}.
OUT: {"outputs", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "seconds"}.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams  # noqa: E402


def main(job_file: str, out_file: str) -> None:
    with open(job_file) as file:
        job = json.load(file)
    speculative = None
    if job["drafter"]:
        speculative = {
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["k"],
            "parallel_drafting": job["parallel"],
        }
    llm = LLM(
        model=job["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_num_seqs=8, disable_log_stats=False,
        max_model_len=max(map(len, job["prompts"])) + job["max_new_tokens"] + 64, speculative_config=speculative,
    )  # fmt: skip
    how = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    start = time.perf_counter()
    answers = llm.generate(prompts, how, use_tqdm=False)
    result = {"outputs": [list(a.outputs[0].token_ids) for a in answers], "seconds": time.perf_counter() - start}
    counters = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_")}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        result[name] = counters[name].value if name in counters else 0
    per_position = counters.get("num_accepted_tokens_per_pos")
    result["accepted_per_position"] = list(per_position.values) if per_position else []
    with open(out_file, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
