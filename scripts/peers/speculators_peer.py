"""speculators' own classes on our folders; check_matrix.py runs it.

It runs in the environment of install_speculators.sh.

    ENV/bin/python scripts/peers/speculators_peer.py logits FOLDER INPUTS.npz OUT.npz
    ENV/bin/python scripts/peers/speculators_peer.py train FOLDER DATA.npz OUT STEPS

logits: `SpeculatorModel.from_pretrained` on FOLDER, and what its lm_head gives for INPUTS (tokens,
  aux_hidden_states, anchor, depth).
train: goes on training the head of FOLDER on DATA (tokens, aux_hidden_states, hidden, loss_mask),
  and saves it by its own `save_pretrained`.
"""

import sys
import warnings

import numpy as np
import torch

warnings.filterwarnings("ignore")
import speculators.models.peagle.core as peagle_core  # noqa: E402
from speculators import SpeculatorModel  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402

torch.manual_seed(0)


def read(folder: str):
    from speculators import SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    # FlexAttention has no CPU backward
    config.transformer_layer_config._attn_implementation = "eager"
    if hasattr(config, "draft_attn_impl"):
        config.draft_attn_impl = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)
    return model, model.config.speculators_model_type == "peagle"


def call(data, parallel: bool, i: int = 0) -> dict:
    tokens = torch.from_numpy(data["tokens"][i : i + 1])
    num_depths = int(data["num_depths"])
    depths = {"num_depths": num_depths}
    if not parallel:
        depths = {"ttt_steps": num_depths, "ttt_step_loss_decay": 1.0}
    return dict(
        hidden_states=torch.from_numpy(data["aux_hidden_states"][i : i + 1]),
        input_ids=tokens,
        document_ids=torch.zeros_like(tokens),
        loss_mask=torch.from_numpy(data["loss_mask"][i : i + 1]).float(),
        loss_config=resolve_loss_config("kl_div", "eager"),
        verifier_last_hidden_states=torch.from_numpy(data["hidden"][i : i + 1]),
        **depths,
    )


def logits(folder: str, inputs: str, out: str) -> None:
    # with two threads, torch 2.13's matrix products differ from run to run by up to 1e-4 of the
    # largest logit
    torch.set_num_threads(1)
    model, parallel = read(folder)
    data = dict(np.load(inputs))
    if parallel:
        peagle_core.generate_cod_sample_indices = lambda **_: (
            torch.from_numpy(data["anchor"]),
            torch.from_numpy(data["depth"]),
        )
    model.load_verifier_weights()
    results = []
    model.lm_head.register_forward_hook(
        lambda module, args, result: results.append(result.detach().clone().numpy())
    )
    with torch.no_grad():
        model(**call(data, parallel))
    np.savez(out, *results)


def train(folder: str, data: str, out: str, steps: str) -> None:
    model, parallel = read(folder)
    model.load_verifier_weights()
    data = dict(np.load(data))
    trained = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and not name.startswith("verifier")
    ]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    losses = []
    for step in range(int(steps)):
        optimizer.zero_grad()
        loss = model(**call(data, parallel, step % len(data["tokens"])))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss))
    model.save_pretrained(out)
    parameters = sum(p.numel() for p in trained)
    before, after = np.mean(losses[:5]), np.mean(losses[-5:])
    print(f"{folder}: loss {before:.3f} -> {after:.3f}, {parameters:,} parameters trained")


if __name__ == "__main__":
    {"logits": logits, "train": train}[sys.argv[1]](*sys.argv[2:])
