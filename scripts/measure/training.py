"""Training speed against speculators' eager CPU training, in one run.

    scripts/peers/install_speculators.sh .venv-speculators
    .venv/bin/python scripts/measure/training.py --speculators .venv-speculators

P-EAGLE head, data shape and optimizer are the same. The two train in turns on one packed sequence
per step, with aux and final hidden states given: COD sampling, forward, backward, AdamW. The median
of the steps counts. Tokens are those of the sequence, not the packed elements.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPE = {
    "vocab": 2048,
    "dim": 192,
    "mlp_dim": 576,
    "layers": 2,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 32,
    "seq_len": 512,
    "num_depths": 8,
    "down_sample_ratio": 0.8,
    "down_sample_ratio_min": 0.2,
}


def peagle_jax_seconds(shape: dict, steps: int) -> list[float]:
    """Seconds of each step of peagle_jax, without the first two."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from peagle_jax.draft.head import DraftHead, HeadConfig
    from peagle_jax.draft.markov import NO_MARKOV
    from peagle_jax.draft.placeholders import PAPER_DESIGN
    from peagle_jax.layers import Rope
    from peagle_jax.train.cod import CodConfig, cod_sample
    from peagle_jax.train.hidden_states import TrainingRows
    from peagle_jax.train.peagle_loss import peagle_loss
    from peagle_jax.types import Model

    s, n, rng = shape, shape["seq_len"], np.random.default_rng(0)
    config = HeadConfig(
        vocab=s["vocab"],
        draft_vocab=s["vocab"],
        dim=s["dim"],
        layers=s["layers"],
        mlp_dim=s["mlp_dim"],
        heads=s["heads"],
        kv_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        rope=Rope.from_hf({"rope_theta": 1e4}, s["head_dim"], ""),
        norm_eps=1e-6,
        context=4096,
        target_dim=s["dim"],
        aux_hidden_state_layers=(1, 3, 5),
        mask_token=1,
        num_depths=s["num_depths"],
        qk_norm=False,
        attention_bias=False,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **PAPER_DESIGN,
        **NO_MARKOV,
        windows=(None,) * s["layers"],
        dtype=jnp.float32,
    )
    head = Model.from_module(DraftHead(config, rngs=nnx.Rngs(0)), config)

    def normal(*size):
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    segment_ids, loss_mask = np.zeros((1, n), np.int64), np.ones((1, n), bool)
    rows = TrainingRows(
        jnp.asarray(rng.integers(0, s["vocab"], (1, n))),
        normal(1, n, 3 * s["dim"]),
        normal(1, n, s["dim"]),
        jnp.asarray(segment_ids),
        jnp.asarray(loss_mask),
    )
    output = normal(s["dim"], s["vocab"])
    cod = CodConfig(
        num_depths=s["num_depths"],
        down_sample_ratio=s["down_sample_ratio"],
        down_sample_ratio_min=s["down_sample_ratio_min"],
    )
    optimizer = optax.adamw(1e-4)

    @jax.jit
    def update(params, opt, elements):
        def loss(params):
            return peagle_loss(head.bind(params), rows, elements, s["num_depths"], output)

        grads, _ = jax.grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    params, opt, seconds = head.params, optimizer.init(head.params), []
    for step in range(steps):
        start = time.perf_counter()
        params, opt = jax.block_until_ready(
            update(params, opt, cod_sample(loss_mask, segment_ids, cod, [0, step]))
        )
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def speculators_seconds(shape: dict, steps: int) -> list[float]:
    """Seconds of each step of speculators, without the first two."""
    import torch
    import transformers
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    s, n = shape, shape["seq_len"]
    layer = transformers.LlamaConfig(
        vocab_size=s["vocab"],
        hidden_size=s["dim"],
        intermediate_size=s["mlp_dim"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        max_position_embeddings=4096,
    )
    layer._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=s["num_depths"])
    model = PEagleDraftModel(
        config=PEagleSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=s["vocab"],
            mask_token_id=1,
            eagle_aux_hidden_state_layer_ids=[1, 3, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="peagle",
                proposal_methods=[method],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    )
    for name, p in model.named_parameters():
        p.data.fill_(1.0) if "norm" in name else p.data.normal_(0, 0.05)
        p.requires_grad_(not name.startswith("verifier"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    call = dict(
        hidden_states=torch.randn(1, n, 3 * s["dim"]),
        input_ids=torch.randint(0, s["vocab"], (1, n)),
        document_ids=torch.zeros(1, n, dtype=torch.long),
        # without position 0, which speculators gives anchor -1 (LOG.md)
        loss_mask=torch.cat([torch.zeros(1, 1), torch.ones(1, n - 1)], 1),
        verifier_last_hidden_states=torch.randn(1, n, s["dim"]),
        loss_config=resolve_loss_config("kl_div", "eager"),
        num_depths=s["num_depths"],
        down_sample_ratio=s["down_sample_ratio"],
        down_sample_ratio_min=s["down_sample_ratio_min"],
    )
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(**call)[1].backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speculators", type=Path, required=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--record",
        "--out",  # the former spelling
        type=Path,
        default=Path("results/training_speed.jsonl"),
        help="append a row",
    )
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure = peagle_jax_seconds if args.side == "ours" else speculators_seconds
        print(json.dumps(measure(SHAPE, args.steps)))
        return
    if args.speculators is None:
        parser.error("--speculators ENV is needed: scripts/peers/install_speculators.sh ENV")
    from peagle_jax.provenance import provenance

    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(args.rounds):
        for side, python in (("ours", sys.executable), ("theirs", args.speculators / "bin/python")):
            done = subprocess.run(
                [python, __file__, "--side", side, "--steps", str(args.steps)],
                capture_output=True,
                text=True,
                check=True,
            )
            seconds[side].append(statistics.median(json.loads(done.stdout.splitlines()[-1])))
    speed = {side: SHAPE["seq_len"] / statistics.median(s) for side, s in seconds.items()}
    row = provenance(f"python scripts/measure/training.py --rounds {args.rounds}") | {
        "name": "training_speed",
        "shape": SHAPE,
        "step_seconds": seconds,
        "tokens_per_second": speed,
        "ratio": speed["ours"] / speed["theirs"],
    }
    args.record.parent.mkdir(parents=True, exist_ok=True)
    with args.record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"peagle_jax {speed['ours']:.0f} tokens/s, speculators {speed['theirs']:.0f} tokens/s: "
        f"{row['ratio']:.2f} times"
    )


if __name__ == "__main__":
    main()
