"""speculators as one of the trainers of compare_training.py, in its own environment.

Model, COD sampling, attention mask, loss and metrics are speculators'; the loop is that of its
`Trainer.train_epoch`, which itself needs an accelerator: forward under autocast where the job is
bfloat16, backward, clipping at 1, AdamW, schedule. AdamW has the settings of peagle_jax, whose
defaults are others.
"""

import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from line_worker import serve

warnings.filterwarnings("ignore")
from speculators import SpeculatorModel, SpeculatorModelConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402


def start(job: dict):
    """Maps the rows of a job; a request trains its head for some steps from the beginning."""
    torch.set_num_threads(job["threads"])
    rows = dict(np.load(Path(job["folder"]) / "rows.npz"))
    for name in ("aux_hidden_states", "before_norm"):
        rows[name] = np.load(Path(job["folder"]) / f"{name}.npy", mmap_mode="r")
    recipe = job["recipe"]
    cod = recipe["cod"]
    in_bfloat16 = recipe["compute"]["dtype"] == "bfloat16"

    def train(request: dict) -> dict:
        model = _load(request["head"], request["attention"])
        torch.manual_seed(recipe["seed"])
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer, schedule = _optimizer(
            params, recipe["optimizer"] | {"warmup": request["warmup"]}, request["schedule_steps"]
        )
        call = {
            "loss_config": resolve_loss_config("kl_div", "eager"),
            "num_depths": cod["num_depths"],
            "down_sample_ratio": cod["down_sample_ratio"],
            "down_sample_ratio_min": cod["down_sample_ratio_min"],
        }
        model.train()

        def loss_of(step: int):
            batch = _batch(rows, request["order"][step % len(request["order"])])
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bfloat16):
                return model(**batch, **call)[1]

        loss_of(0).backward()  # allocates; nothing is trained
        losses = []
        began, cpu_began = time.perf_counter(), time.process_time()
        for step in range(request["steps"]):
            loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["optimizer"]["max_grad_norm"])
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - cpu_began
        if request["out"] is not None:
            model.save_pretrained(request["out"])
        return {
            "training_seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "losses": [float(loss) for loss in losses],
            "trained_parameters": sum(p.numel() for p in params.values()),
        }

    return train


def _load(folder: str, attention: str):
    """The head of a folder in speculators' format, with the target's norm and output matrix."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = attention
    if hasattr(config, "draft_attn_impl"):
        config.draft_attn_impl = attention
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)
    model.load_verifier_weights()
    return model


def _optimizer(params: dict, config: dict, steps: int):
    """AdamW with linear warm-up and cosine decay to a tenth, as peagle_jax's."""
    is_matrix = {name: p.ndim > 1 and "mask_hidden" not in name for name, p in params.items()}
    groups = [
        {
            "params": [p for name, p in params.items() if is_matrix[name] == decayed],
            "weight_decay": config["weight_decay"] if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=config["peak_lr"], betas=(0.9, 0.95), eps=1e-8)
    warmup = min(config["warmup"], max(steps - 1, 0))

    def share(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _batch(rows: dict[str, np.ndarray], row: int) -> dict[str, torch.Tensor]:
    """The input of a step, shifted as speculators' own data set shifts it."""
    segments = rows["segment_ids"][row]
    # padding is a document of its own: what attends to nothing is not a number in torch
    segments = np.where(segments < 0, segments.max() + 1, segments)
    joins = segments[1:] != segments[:-1]
    is_last = np.append(segments[2:] != segments[1:-1], False)
    loss_mask = rows["loss_mask"][row, 1:] & ~joins & ~is_last
    return {
        "hidden_states": torch.from_numpy(np.array(rows["aux_hidden_states"][row : row + 1, :-1])),
        "input_ids": torch.from_numpy(rows["tokens"][row : row + 1, 1:].astype(np.int64)),
        # a row that joins two documents has no loss, and stays with the first of them
        "document_ids": torch.from_numpy(segments[None, :-1].astype(np.int64)),
        "loss_mask": torch.from_numpy(loss_mask[None].astype(np.float32)),
        "verifier_last_hidden_states": torch.from_numpy(
            np.array(rows["before_norm"][row : row + 1, 1:])
        ),
    }


if __name__ == "__main__":
    serve(start, "speculators")
