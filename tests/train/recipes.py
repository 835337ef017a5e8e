"""Recipes for tests: the shortest ones, every default, and every key changed."""

from pathlib import Path

import yaml

from peagle_jax.train.config import load_run

MINIMAL = {
    "peagle": {"target": "folder", "out": "runs/x", "data": {"source": "answers.jsonl"}},
    "eagle3": {"target": "folder", "out": "runs/x", "data": {"source": "answers.jsonl"}},
    "eagle": {"target": "folder", "out": "runs/x", "data": {"source": "answers.jsonl"}},
    "lm": {
        "out": "runs/x",
        "model": {
            "vocab": 300,
            "layers": 2,
            "dim": 32,
            "mlp_dim": 48,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
        },
    },
}
DATA = {
    "source": "answers.jsonl",
    "max_chars": None,
    "held_out": 0.05,
    "seq_len": 2048,
    "packing": "cut",
    "batch_size": 8,
    "bad_rows": "refuse",
    "chat_template_kwargs": None,
    "special_tokens": False,
    "split_turns": False,
}
HEAD = {
    "dim": None,
    "mlp_dim": None,
    "heads": None,
    "kv_heads": None,
    "head_dim": None,
    "draft_vocab": None,
    "aux_hidden_state_layers": None,
    "qk_norm": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "mask_token": None,
    "rope": None,
    "sliding_window": None,
}
OPTIMIZER = {
    "name": "adamw",
    "steps": 10_000,
    "peak_lr": 1e-4,
    "warmup": 300,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}
EVERY_RUN = {
    "seed": 0,
    "log_every": 50,
    "save_every": 1000,
    "keep_checkpoints": 2,
    "trackers": [],
    "max_seconds": None,
    "out": "runs/x",
    "gradient_accumulation": 1,
    "mesh": {"data": 1, "fsdp": 1, "model": 1},
}
EVERY_HEAD = EVERY_RUN | {
    "target": "folder",
    "target_dtype": "float32",
    "hidden_states_dir": None,
    "loss": "forward_kl",
    "init": "random",
    "init_from": None,
    "depth_schedule": [],
    "train_lm_head": False,
    "compute": {"dtype": "float32", "recompute": "none"},
    "eval": {
        "every": 1000,
        "prompts": None,
        "num_prompts": 16,
        "max_new_tokens": 96,
        "ignore_eos": False,
        "keep": "last",
        "patience": None,
    },
    "data": DATA,
    "optimizer": OPTIMIZER,
}
DEFAULTS = {
    "peagle": EVERY_HEAD
    | {
        "task": "peagle",
        "head": {"layers": 4, **HEAD},
        "train_embedding": True,
        "cod": {
            "num_depths": 8,
            "down_sample_ratio": 0.7,
            "down_sample_ratio_min": 0.2,
            "max_anchors": None,
            "partitions": 1,
        },
        "placeholder": {
            "hidden": "shared",
            "token": "mask",
            "attention": "causal",
            "context": "layers",
            "true_tokens": 0.0,
        },
        "markov": None,
        "confidence": None,
        "feature_noise": {"noise": 0.0, "dropout": 0.0},
        "depth_weights": None,
    },
    "eagle3": EVERY_HEAD
    | {
        "task": "eagle3",
        "head": {"layers": 1, **HEAD},
        "train_embedding": False,
        "ttt": {"steps": 6, "decay": 1.0},
    },
    "eagle": EVERY_HEAD
    | {
        "task": "eagle",
        "head": {"layers": 1, **HEAD},
        "train_embedding": False,
        "regression": {"weight": 1.0, "token_weight": 0.1, "noise": 0.1},
        "num_speculative_tokens": 6,
    },
    "lm": EVERY_RUN
    | {
        "task": "lm",
        "model": {**MINIMAL["lm"]["model"], "rope_theta": 10_000.0, "context": 4096},
        "data": {**DATA, "source": None, "seq_len": 256},
        "optimizer": {
            **OPTIMIZER,
            "steps": 4000,
            "peak_lr": 2e-3,
            "warmup": 200,
            "weight_decay": 0.1,
        },
    },
}
# Every key with a value that is not its default.
ALL_CHANGED = {
    "seed": 3,
    "log_every": 7,
    "save_every": 9,
    "keep_checkpoints": 5,
    "trackers": ["tensorboard", "wandb"],
    "max_seconds": 4.5,
    "gradient_accumulation": 2,
    "mesh": {"data": 2, "fsdp": 3, "model": 4},
    "target_dtype": "bfloat16",
    "hidden_states_dir": "states",
    "loss": "cross_entropy",
    "init": "target",
    "init_from": "trained",
    "depth_schedule": [{"until": 2, "num_depths": 1}, {"until": 3, "num_depths": 2}],
    "train_embedding": False,
    "train_lm_head": True,
    "compute": {"dtype": "bfloat16", "recompute": "layers"},
    "eval": {
        "every": 13,
        "prompts": "p.jsonl",
        "num_prompts": 3,
        "max_new_tokens": 5,
        "ignore_eos": True,
        "keep": "best",
        "patience": 4,
    },
    "data": {
        "source": "answers.jsonl",
        "max_chars": 77,
        "held_out": 0.25,
        "seq_len": 64,
        "packing": "whole",
        "batch_size": 24,
        "bad_rows": "skip",
        "chat_template_kwargs": {"enable_thinking": False},
        "special_tokens": True,
        "split_turns": True,
    },
    "optimizer": {
        "name": "muon",
        "steps": 60,
        "peak_lr": 0.5,
        "warmup": 4,
        "weight_decay": 0.25,
        "max_grad_norm": 0.75,
    },
    "head": {
        "layers": 3,
        "dim": 48,
        "mlp_dim": 50,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 10,
        "draft_vocab": 99,
        "aux_hidden_state_layers": [1, 4],
        "qk_norm": True,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "mask_token": 5,
        "rope": {
            "rope_theta": 1000.0,
            "factor": 2.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.5,
            "original_max_position_embeddings": 512,
        },
        "sliding_window": 33,
    },
    "cod": {
        "num_depths": 5,
        "down_sample_ratio": 0.5,
        "down_sample_ratio_min": 0.125,
        "max_anchors": 11,
        "partitions": 3,
    },
    "placeholder": {
        "hidden": "per_depth",
        "token": "frozen",
        "attention": "bidirectional",
        "context": "injected",
        "true_tokens": 0.0,  # excludes a confidence head
    },
    "markov": {"rank": 7, "kind": "rnn", "train_alone": True},
    "confidence": {"train_alone": True},
    "feature_noise": {"noise": 0.5, "dropout": 0.25},
    "depth_weights": [1.0, 0.75, 0.5, 0.25, 2.0],
}


def write(path: Path, recipe: dict) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


def load(tmp_path: Path, recipe: dict):
    return load_run(write(tmp_path / "recipe.yaml", recipe))


def minimal(task: str, **changes) -> dict:
    return {"task": task, **MINIMAL[task], **changes}
