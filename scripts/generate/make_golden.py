"""Golden losses and gradients from speculators' PyTorch trainer, for tests/train/test_golden.py.

    scripts/peers/install_speculators.sh ENV
    ENV/bin/python scripts/generate/make_golden.py tests/golden

Each case is one .npz with `config` (the head's config.json in speculators' format), `w/NAME`
weights and `g/NAME` gradients under speculators' tensor names, the inputs, the (anchor, depth) of
COD sampling, and the loss. All options have values that are not their defaults.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import speculators.models.peagle.core as peagle_core
import torch
import transformers
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

V, D, N, K = 83, 32, 23, 5

# name -> (algorithm, style, layers, draft vocabulary, options)
CASES = {
    "peagle_qwen3": ("peagle", "qwen3", 3, 41, {"norm_before_residual": True, "fc_norm": True}),
    "peagle_llama": ("peagle", "llama", 2, V, {"norm_before_fc": True}),
    "eagle3_llama": ("eagle3", "llama", 1, 41, {"norm_before_residual": True}),
    "eagle3_qwen3": (
        "eagle3",
        "qwen3",
        1,
        V,
        {"norm_before_residual": False, "norm_output": True, "fc_norm": True},
    ),
}


def layer_config(style: str, layers: int):
    shape = dict(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=56,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=3e-3,
        max_position_embeddings=96,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0},
        attention_bias=style == "llama",
    )
    config = (transformers.Qwen3Config if style == "qwen3" else transformers.LlamaConfig)(**shape)
    config._attn_implementation = "eager"
    return config


def make(name: str):
    algorithm, style, layers, draft_vocab, options = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model_class, config_class = {
        "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
        "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
    }[algorithm]
    more = {"mask_token_id": 7} if algorithm == "peagle" else {}
    config = config_class(
        transformer_layer_config=layer_config(style, layers),
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=[1, 3, 4],
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **more,
        **options,
    )
    model = model_class(config=config)
    for key, p in model.named_parameters():
        p.requires_grad_(True)
        p.data.uniform_(0.5, 1.5) if "norm" in key else p.data.normal_(0, 0.15)
    if draft_vocab != V:
        ids = torch.sort(torch.randperm(V)[:draft_vocab])[0]
        t2d = torch.zeros(V, dtype=torch.bool)
        t2d[ids] = True
        model.load_vocab_mappings(t2d, ids - torch.arange(draft_vocab))
    return model


def chains(loss_mask: np.ndarray, segment_ids: np.ndarray, rng) -> tuple[np.ndarray, np.ndarray]:
    """A nested choice of (anchor, depth), depth-major as speculators packs it, documents apart."""
    anchor, depth, positions = [np.arange(N)], [np.zeros(N, int)], np.arange(N)
    for d in range(1, K):
        candidates = [
            p + 1
            for p in positions
            if p + 1 < N and loss_mask[p + 1] and segment_ids[p + 1] == segment_ids[p]
        ]
        size = max(1, int(len(candidates) * 0.8))
        positions = np.sort(rng.choice(candidates, size, replace=False))
        anchor.append(positions - d)
        depth.append(np.full(len(positions), d))
    return np.concatenate(anchor), np.concatenate(depth)


def case(name: str) -> dict[str, np.ndarray]:
    model, rng = make(name), np.random.default_rng(5)
    segment_ids = np.repeat([0, 1], [14, N - 14])
    loss_mask = rng.random(N) < 0.8
    loss_mask[[0, 15]] = True
    if name.startswith("eagle3"):
        # speculators' TTT lets a chain run into the next document; one document has no such place
        segment_ids[:] = 0
    inputs = {
        "aux_hidden_states": rng.normal(size=(1, N, 3 * D)).astype(np.float32),
        "tokens": rng.integers(0, V, (1, N)),
        "teacher": rng.normal(size=(1, N, D)).astype(np.float32),
        "segment_ids": segment_ids[None],
        "loss_mask": loss_mask[None],
    }
    call = dict(
        hidden_states=torch.from_numpy(inputs["aux_hidden_states"]),
        input_ids=torch.from_numpy(inputs["tokens"]),
        document_ids=torch.from_numpy(inputs["segment_ids"]),
        loss_mask=torch.from_numpy(inputs["loss_mask"]).float(),
        verifier_last_hidden_states=torch.from_numpy(inputs["teacher"]),
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    if name.startswith("peagle"):
        anchor, depth = chains(loss_mask, segment_ids, rng)
        inputs |= {"anchor": anchor, "depth": depth}
        peagle_core.generate_cod_sample_indices = lambda **_: (
            torch.from_numpy(anchor),
            torch.from_numpy(depth),
        )
        _, loss, metrics = model(num_depths=K, **call)
        correct = [float(metrics[f"position_{d}_acc_sum"]) for d in range(K)]
    else:
        # speculators looks up EAGLE-3's embeddings under no_grad: they get no gradient
        _, loss, metrics = model(ttt_steps=K, ttt_step_loss_decay=0.9, **call)
        correct = []
    loss.backward()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
    out = {
        "config": np.array(json.dumps(config)),
        "loss": loss.detach().numpy(),
        "correct": np.array(correct),
        **inputs,
    }
    out |= {f"w/{k}": v.detach().numpy() for k, v in model.state_dict().items()}
    out |= {
        f"g/{k}": p.grad.numpy()
        for k, p in model.named_parameters()
        if p.grad is not None and not k.startswith("verifier")
    }
    return out


def main(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        values = case(name)
        np.savez_compressed(folder / f"{name}.npz", **values)
        gradients = sum(key.startswith("g/") for key in values)
        print(f"{name}: loss {float(values['loss']):.6f}, {gradients} gradients")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
