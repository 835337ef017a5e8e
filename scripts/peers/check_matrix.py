"""Do real vLLM and speculators accept our folders? Heads of every option, in every format.

    scripts/peers/install_vllm.sh .venv-vllm
    scripts/peers/install_speculators.sh .venv-speculators
    .venv/bin/python scripts/peers/check_matrix.py --vllm .venv-vllm \\
        --speculators .venv-speculators --out runs/matrix \\
        [--only NAME,...] [--record results/checkpoint_matrix.jsonl]

vLLM serves the vllm format (A) with `--speculative-config` and `parallel_drafting`, and the
speculators format (B) by nothing but the folder's name. Its tokens and counters must be those of
our own decoding with the same folder. speculators loads format B and must give our logits. Heads
that it went on training and saved are read back.
Exit code 0: all agree. 1: something differs.
"""

import argparse
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matrix_heads
import numpy as np
from check_vllm import COUNTERS, answers_of_vllm, our_answers
from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.runs import load_drafter
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.draft import placeholders
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.provenance import append_rows
from peagle_jax.train.attention import PackedCausal, PrefixChain
from peagle_jax.types import Model

TARGET = ASSETS / "target"
K, NEW, LENGTH = 4, 64, 96
# vLLM's reading of a speculators peagle folder ignores some options.
NOT_IN_SPECULATORS_FORMAT = ("fc_norm_output",)
# How the head comes into our hands: who wrote the first folder, in which dtype, and the size of
# its files. Heads that are not named here come from a training run, in float32.
ROUTES = {
    "plain": ("orbax", "bfloat16", 3_000_000),
    "four_taps": ("orbax", "float16", None),
    "llama": ("fp8", "bfloat16", None),
    "four_layers": ("fp8", "float32", None),
    "reduced": ("automodel", "float32", None),
    "llama3": ("automodel", "float16", 5_000_000),
    "eagle3_llama": ("automodel", "bfloat16", None),
    "norm_before_fc": ("specforge", "float32", None),
    "own_kv_heads": ("specforge", "bfloat16", None),
}
# Heads that speculators goes on training.
TRAINED = {
    "spec_peagle_qwen3": "plain",
    "spec_peagle_llama": "llama_bias",
    "spec_eagle3_qwen3": "eagle3",
    "spec_eagle3_llama": "eagle3_llama",
}
# How far logits of speculators may be from ours in float64: LOGITS of the largest, or this many
# times as far as ours in float32 are, where float32 itself decides (attention that weighs two keys
# by large scores of nearly one size).
LOGITS, ROUNDINGS = 1e-5, 4


@dataclasses.dataclass
class Case:
    """A folder to show to the peers.

    Attributes:
      head: a name in `matrix_heads.HEADS` or `TRAINED`.
      checkpoint_format: of the folder.
      folder: where it is.
      route: who wrote the folder that it was converted from.
      alone: vLLM is given nothing but the folder.
    """

    head: str
    checkpoint_format: str
    folder: Path
    route: str
    alone: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--speculators", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/matrix"))
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    names = args.only or [*matrix_heads.HEADS, *(TRAINED if args.speculators else ())]
    shutil.rmtree(args.out, ignore_errors=True)
    cases = [case for name in names if name in matrix_heads.HEADS for case in write(name, args.out)]
    rows = []
    if args.speculators:
        rows += [
            check_logits(case, args.speculators, args.out)
            for case in cases
            if case.checkpoint_format == "speculators" and not case.head.startswith("wide")
        ]
        for name in set(names) & TRAINED.keys():
            folder = train(name, args.speculators, args.out)
            cases.append(Case(name, "speculators", folder, "speculators", alone=True))
    if args.vllm:
        rows += check_decoding(cases, args.vllm)
    show(rows)
    if args.record:
        named = [{"name": "checkpoint_matrix"} | row for row in rows]
        append_rows(args.record, named, "scripts/peers/check_matrix.py")
    return 0 if rows and all(row["agrees"] for row in rows) else 1


def write(name: str, out: Path) -> list[Case]:
    """The head as somebody else wrote it, converted to format A, and from there to B."""
    route, dtype, shard = ROUTES.get(name, ("orbax", "float32", None))
    first, source = out / f"{name}-own", out / f"{name}-{route}"
    save_drafter(
        matrix_heads.make(name), first, dtype="float32" if route in ("orbax", "fp8") else dtype
    )
    if route == "orbax":
        convert(first, source, to="orbax")
    else:
        matrix_heads.WRITERS[route](first, source)
    convert(
        source,
        out / f"{name}-A",
        to="vllm",
        dtype=dtype,
        target=TARGET,
        k=K,
        max_shard_bytes=shard,
        share_embedding=name == "eagle3_shared",
    )
    cases = [Case(name, "vllm", out / f"{name}-A", route, alone=False)]
    if name not in NOT_IN_SPECULATORS_FORMAT:
        convert(
            out / f"{name}-A",
            out / f"{name}-B",
            to="speculators",
            target=TARGET,
            max_shard_bytes=shard,
        )
        cases.append(Case(name, "speculators", out / f"{name}-B", route, alone=True))
    return cases


@functools.cache
def prompts() -> list[list[int]]:
    return standard_prompts(text.load_tokenizer(TARGET), 6)


@functools.cache
def target(aux_hidden_state_layers: tuple[int, ...]) -> Model:
    return load_target(TARGET, aux_hidden_state_layers=aux_hidden_state_layers, dtype=np.float32)


def embedding() -> jax.Array:
    return target(()).params["embed"]["table"]


def check_decoding(cases: list[Case], env: Path) -> list[dict]:
    """vLLM's tokens and counters against ours; a row for each case."""
    heads = [load_drafter(case.folder, dtype=np.float32, embedding=embedding()) for case in cases]
    jobs = [
        {
            "target": str(TARGET.resolve()),
            "drafter": str(case.folder.resolve()),
            "k": K,
            "parallel": head.config.parallel,
            "prompts": prompts(),
            "max_new_tokens": NEW,
            "alone": case.alone,
        }
        for case, head in zip(cases, heads, strict=True)
    ]
    rows = []
    for case, head, theirs in zip(cases, heads, answers_of_vllm(env, jobs), strict=True):
        row = {
            "peer": "vllm",
            "peer_version": theirs["version"],
            "head": case.head,
            "checkpoint_format": case.checkpoint_format,
            "route": case.route,
            "dtype": dtype_of(case.folder),
        }
        if "error" in theirs:
            rows.append(row | {"agrees": False, "found": theirs["error"]})
            continue
        model = target(tuple(head.config.aux_hidden_state_layers))
        answers, counted = our_answers(model, head, prompts(), K, NEW)
        comparison = compare(model, prompts(), answers, theirs["outputs"])
        # counters are only comparable where the texts are the same
        same_counters = all(counted[c] == theirs[c] for c in COUNTERS)
        agrees = comparison.lossless and (comparison.near_ties > 0 or same_counters)
        vllm_counters = "/".join(str(theirs[c]) for c in COUNTERS[:3])
        found = f"{comparison.same}/{len(answers)} texts, {vllm_counters}"
        if not agrees:
            found += " where ours are " + "/".join(str(counted[c]) for c in COUNTERS[:3])
        rows.append(
            row
            | {
                "agrees": agrees and theirs["num_accepted_tokens"] > 0,
                "found": found,
                "same": comparison.same,
                "near_ties": comparison.near_ties,
                "num_accepted_per_pos": theirs["num_accepted_per_pos"],
                "ours": counted,
                "vllm": {c: theirs[c] for c in COUNTERS},
            }
        )
    return rows


def dtype_of(folder: Path) -> str:
    """The dtype that a head's config.json names."""
    raw = json.loads((folder / "config.json").read_text())
    return raw.get("dtype") or raw.get("torch_dtype") or "float32"


# ---------------------------------------------------------------- speculators


def check_logits(case: Case, env: Path, out: Path) -> dict:
    """The logits of speculators and of ours, on random inputs, which are written to `out`."""
    head = load_drafter(case.folder, dtype=np.float32, embedding=embedding())
    cfg, rng, n = head.config, np.random.default_rng(1), 24
    anchor, depth = np.arange(n), np.zeros(n, int)
    if cfg.parallel:
        anchors = np.arange(n - K)
        for d in range(1, K):
            # chains are nested: an anchor of one depth was an anchor of the depth before
            anchors = np.sort(rng.permutation(anchors)[: n - K - 2 * d])
            anchor = np.concatenate([anchor, anchors])
            depth = np.concatenate([depth, np.full(len(anchors), d)])
    aux_shape = (1, n, len(cfg.aux_hidden_state_layers) * cfg.target_dim)
    inputs = {
        "tokens": rng.integers(5, cfg.vocab, (1, n)),
        "aux_hidden_states": rng.normal(0, 2, aux_shape).astype(np.float32),
        "hidden": rng.normal(size=(1, n, cfg.target_dim)).astype(np.float32),
        "loss_mask": np.ones((1, n), bool),
        "anchor": anchor,
        "depth": depth,
        "num_depths": K if cfg.parallel else 1,
    }
    inputs_file = out / f"{case.head}-inputs.npz"
    logits_file = out / f"{case.head}-logits.npz"
    np.savez(inputs_file, **inputs)
    row = {
        "peer": "speculators",
        "head": case.head,
        "checkpoint_format": case.checkpoint_format,
        "route": case.route,
        "dtype": dtype_of(case.folder),
    }
    done = run_speculators(env, "logits", case.folder, inputs_file, logits_file)
    if done.returncode:
        return row | {
            "agrees": False,
            "found": (done.stderr.strip().splitlines() or ["nothing said"])[-1],
        }
    theirs = np.load(logits_file)["arr_0"][0]
    exact, ours = float64_logits(head, inputs), our_logits(head, inputs)
    error, our_error = (
        float(np.abs(x - exact).max() / np.abs(exact).max()) for x in (theirs, ours)
    )
    return row | {
        "agrees": error < max(LOGITS, ROUNDINGS * our_error) and our_error < LOGITS,
        "found": f"logits differ by {error:.1e}, ours by {our_error:.1e}",
        "error": error,
        "our_error": our_error,
    }


def float64_logits(head: Model, inputs: dict) -> np.ndarray:
    """`our_logits` with every product and sum in float64."""

    def widen(x):
        return np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    arrays = {"aux_hidden_states": widen(inputs["aux_hidden_states"])}
    with jax.enable_x64(True):
        head = dataclasses.replace(head, params=jax.tree.map(widen, head.params))
        return our_logits(head, inputs | arrays)


def our_logits(head: Model, inputs: dict) -> np.ndarray:
    """Logits of packed (anchor, depth) elements.

    Depth 0 comes first, and then one depth after the other, as speculators packs them.
    """
    tokens = jnp.asarray(inputs["tokens"])
    aux_hidden_states = jnp.asarray(inputs["aux_hidden_states"])
    n, is_deep = tokens.shape[1], inputs["depth"] > 0
    # ours are packed one anchor after the other
    order = np.lexsort((inputs["depth"][is_deep], inputs["anchor"][is_deep]))
    anchor = jnp.asarray(inputs["anchor"][is_deep][order][None], jnp.int32)
    depth = jnp.asarray(inputs["depth"][is_deep][order][None], jnp.int32)
    positions, segment_ids = jnp.arange(n)[None], jnp.zeros((1, n), jnp.int32)

    @jax.jit
    def run(params):
        module = head.bind(params)
        embeddings, fused = module.embed(tokens), module.fuse(aux_hidden_states)
        if not head.config.parallel:
            attend = PackedCausal(segment_ids)
            hidden, _ = module(embeddings, fused, positions, attend, None)
            return module.compute_logits(hidden[0])
        at_anchor = [jnp.take_along_axis(x, anchor[..., None], axis=1) for x in (embeddings, fused)]
        unfilled = placeholders.PlaceholderRow(depth, *at_anchor)
        mask_embeddings, mask_fused = placeholders.rows(module, unfilled)
        hidden, _ = module(
            jnp.concatenate([embeddings, mask_embeddings], axis=1),
            jnp.concatenate([fused, mask_fused], axis=1),
            jnp.concatenate([positions, anchor + depth], axis=1),
            PrefixChain(anchor, depth, segment_ids, K),
            None,
        )
        return module.compute_logits(hidden[0])

    result = np.array(run(head.params))
    result[n:] = result[n:][np.argsort(order)]
    return result


def train(name: str, env: Path, out: Path) -> Path:
    """A few steps of speculators' own training on our target's hidden states.

    Returns:
      The folder in `out` that speculators saved.
    """
    start = out / f"{TRAINED[name]}-B"
    if not start.exists():
        write(TRAINED[name], out)
    data, folder = out / f"{name}-data.npz", out / name
    config = load_drafter(start, embedding=embedding()).config
    np.savez(data, **training_data(tuple(config.aux_hidden_state_layers)))
    done = run_speculators(env, "train", start, data, folder, 24)
    if done.returncode:
        raise SystemExit(f"speculators failed to train {name}:\n{done.stderr[-2000:]}")
    Console().print(done.stdout.strip())
    return folder


@functools.cache
def training_data(aux_layers: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Text of our target with its aux hidden states, and its last ones before the final norm.

    They are shifted against each other as heads are trained.
    """
    model = target((*aux_layers, target(()).config.layers))
    prompts = standard_prompts(text.load_tokenizer(TARGET), 12)
    texts, _ = our_answers(target(()), None, prompts, 0, LENGTH)
    tokens = jnp.asarray([t[:LENGTH] for t in texts])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    attend = PackedCausal(jnp.zeros_like(tokens))
    out, _ = jax.jit(lambda p: model.bind(p)(tokens, positions, attend, None))(model.params)
    hidden_states = np.asarray(out.aux_hidden_states)
    aux_dim = hidden_states.shape[-1] // (len(aux_layers) + 1) * len(aux_layers)
    loss_mask = np.ones((len(texts), LENGTH - 1), bool)
    loss_mask[:, 0] = False  # speculators 0.9 gives position 0 the anchor -1
    return {
        "tokens": np.asarray(tokens[:, 1:], np.int64),
        "aux_hidden_states": hidden_states[:, :-1, :aux_dim],
        "hidden": hidden_states[:, 1:, aux_dim:],
        "loss_mask": loss_mask,
        "num_depths": np.array(K),
    }


def run_speculators(env: Path, *words: object) -> subprocess.CompletedProcess:
    """speculators_peer.py in the environment of speculators."""
    script = Path(__file__).with_name("speculators_peer.py")
    return subprocess.run(
        [env / "bin/python", script, *map(str, words)], capture_output=True, text=True
    )


def show(rows: list[dict]) -> None:
    """Prints the rows as a table."""
    table = Table(
        "peer", "head", "format", "came as", "dtype", "found", "accepted per position", "agrees"
    )
    for row in rows:
        per_position = " ".join(str(int(n)) for n in row.get("num_accepted_per_pos", []))
        table.add_row(
            *(row[key] for key in ("peer", "head", "checkpoint_format", "route", "dtype", "found")),
            per_position,
            "yes" if row["agrees"] else "NO",
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    sys.exit(main())
