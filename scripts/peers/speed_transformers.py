"""transformers (PyTorch) as one of the engines of compare_speed.py.

Its assisted decoding knows neither EAGLE-3 nor P-EAGLE heads. The method "prompt_lookup" is its
draft-free kind: K tokens are copied from where the last tokens occurred before. "static" is plain
decoding with a cache that does not grow, with which transformers compiles its step on a GPU.
It runs on a GPU where torch sees one.
"""

import torch
from line_worker import batches, serve
from transformers import AutoModelForCausalLM


def start(job: dict):
    """Loads the target of a job; greedy decoding."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=getattr(torch, job["dtype"]), local_files_only=True
    )
    model = model.eval().to(device)
    options = {}
    if job["method"] == "prompt_lookup":
        options["prompt_lookup_num_tokens"] = job["k"]
    if job["method"] == "static":
        options["cache_implementation"] = "static"

    @torch.inference_mode()
    def decode(request: dict) -> dict:
        outputs = []
        for prompts in batches(request):
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor(
                [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            )
            answers = model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                max_new_tokens=request["max_new_tokens"],
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
            outputs += answers[:, width:].tolist()
        return {"outputs": outputs, "device": "cpu" if device == "cpu" else "gpu"}

    return decode


if __name__ == "__main__":
    serve(start, "transformers")
