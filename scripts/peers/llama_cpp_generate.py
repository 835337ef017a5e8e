"""Runs in llama.cpp's environment: decodes one job of check_llama_cpp.py with llama.cpp's server.

    python llama_cpp_generate.py JOB.json ANSWER.json

The job: {"target", "drafter" (files, the drafter may be null), "k", "prompts", "max_new_tokens"}.
The answer: {"outputs", "num_draft_tokens", "num_accepted_tokens", "version"}. Everything is
float32 but what the files hold otherwise, and greedy. The prompts are token ids, and the tokens of
the answers come from the server's own endpoint, because the binding returns text alone.
"""

import importlib.metadata
import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp

THREADS = 1  # more of them wait for one another in loops, which starves on a busy machine
CONTEXT = 4096  # positions of target and draft


def start(job: dict) -> xllamacpp.Server:
    """A server on a free port of this machine."""
    types = xllamacpp.ggml_type
    params = xllamacpp.CommonParams()
    params.model.path = job["target"]
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_gpu_layers, params.fit_params, params.warmup = 0, False, False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = types.GGML_TYPE_F32
    params.cpuparams.n_threads = THREADS
    if job["drafter"] is not None:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = params.speculative.draft
        draft.mparams.path = job["drafter"]
        # every draft has K tokens, however unlikely they are
        draft.n_max, draft.n_min, draft.p_min = job["k"], 0, 0.0
        draft.n_gpu_layers = 0
        draft.cache_type_k = draft.cache_type_v = types.GGML_TYPE_F32
        draft.cpuparams.n_threads = THREADS
    return xllamacpp.Server(params)


def complete(address: str, prompt: list[int], max_new_tokens: int) -> dict:
    """The server's answer to one prompt."""
    body = {
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "temperature": 0.0,
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{address}/completion",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    server = start(job)
    answers = [
        complete(server.listening_address, prompt, job["max_new_tokens"])
        for prompt in job["prompts"]
    ]
    timings = [answer["timings"] for answer in answers]
    result = {
        "outputs": [answer["tokens"] for answer in answers],
        "num_draft_tokens": [t.get("draft_n", 0) for t in timings],
        "num_accepted_tokens": [t.get("draft_n_accepted", 0) for t in timings],
        "version": "xllamacpp " + importlib.metadata.version("xllamacpp"),
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
