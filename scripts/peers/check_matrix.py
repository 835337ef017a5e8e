"""Do the peers accept our folders? Heads of every option, through every layout, before real vLLM and speculators.

    scripts/peers/install_vllm.sh .venv-vllm;  scripts/peers/install_speculators.sh .venv-speculators
    .venv/bin/python scripts/peers/check_matrix.py --vllm .venv-vllm --speculators .venv-speculators --out runs/matrix \
        [--only NAME,...] [--record results/checkpoint_matrix.jsonl]

vLLM serves layout A by the flag with `parallel_drafting`, and layout B by nothing but the folder's name: same tokens and same counters as
our own decoding of the same folder. speculators loads layout B and gives our logits; heads that it trained and saved are read back.
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
from check_vllm import COUNTERS, by_vllm, ours
from rich.console import Console
from rich.table import Table

from peagle_jax import text
from peagle_jax.bench.exact import compare
from peagle_jax.checkpoints.convert import convert
from peagle_jax.checkpoints.head_io import load_drafter, save_drafter
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.draft import placeholders
from peagle_jax.pipelines.demo import ASSETS, standard_prompts
from peagle_jax.provenance import provenance
from peagle_jax.train.attention import PackedCausal, PrefixChain
from peagle_jax.types import Model

TARGET = ASSETS / "target"
K, NEW, LENGTH = 4, 64, 96
B_CANNOT = ("fc_norm_output",)  # what vLLM's reading of a speculators peagle folder ignores
ROUTES = {  # how the head comes into our hands: who wrote the first folder, in which dtype, in how many files
    "plain": ("orbax", "bfloat16", 3_000_000),
    "four_taps": ("orbax", "float16", None),
    "llama": ("fp8", "bfloat16", None),
    "two_layers": ("fp8", "float32", None),
    "reduced": ("automodel", "float32", None),
    "llama3": ("automodel", "float16", 5_000_000),
    "eagle3_llama": ("automodel", "bfloat16", None),
    "norm_before_fc": ("specforge", "float32", None),
    "own_kv_heads": ("specforge", "bfloat16", None),
}
TRAINED = {  # heads that speculators goes on training
    "spec_peagle_qwen3": "plain",
    "spec_peagle_llama": "llama_bias",
    "spec_eagle3_qwen3": "eagle3",
    "spec_eagle3_llama": "eagle3_llama",
}
LOGITS = 1e-5  # largest difference, relative to the largest logit


@dataclasses.dataclass
class Case:
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
            check_logits(case, args)
            for case in cases
            if case.checkpoint_format == "speculators" and not case.head.startswith("wide")
        ]
        for name in set(names) & TRAINED.keys():
            cases.append(Case(name, "speculators", train(name, args), "speculators", alone=True))
    if args.vllm:
        rows += check_decoding(cases, args)
    show(rows)
    if args.record:
        command = "python scripts/peers/check_matrix.py " + " ".join(sys.argv[1:])
        with args.record.open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps(provenance(command) | {"name": "checkpoint_matrix"} | row) + "\n"
                for row in rows
            )
    return 0 if rows and all(row["agrees"] for row in rows) else 1


def write(name: str, out: Path) -> list[Case]:
    """The head as somebody else wrote it, converted to layout A, and from there to B."""
    route, dtype, shard = ROUTES.get(name, ("orbax", "float32", None))
    head, own = matrix_heads.make(name), out / f"{name}-own"
    save_drafter(head, own, dtype="float32" if route in ("orbax", "fp8") else dtype)
    source = own
    if route == "orbax":
        convert(own, out / f"{name}-orbax", to="orbax")
        source = out / f"{name}-orbax"
    else:
        source = getattr(matrix_heads, f"as_{route}")(own, out / f"{name}-{route}")
    share = name == "eagle3_shared"
    convert(
        source,
        out / f"{name}-A",
        to="vllm",
        dtype=dtype,
        target=TARGET,
        k=K,
        max_shard_bytes=shard,
        share_embedding=share,
    )
    cases = [Case(name, "vllm", out / f"{name}-A", route, alone=False)]
    if name not in B_CANNOT:
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


def check_decoding(cases: list[Case], args) -> list[dict]:
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
    for case, head, theirs in zip(cases, heads, by_vllm(args.vllm, jobs), strict=True):
        row = {
            "peer": "vllm",
            "head": case.head,
            "layout": case.checkpoint_format,
            "route": case.route,
            "dtype": dtype_of(case.folder),
        }
        if "error" in theirs:
            rows.append(row | {"agrees": False, "found": theirs["error"]})
            continue
        model = target(tuple(head.config.aux_hidden_state_layers))
        mine, counted = ours(model, head, prompts(), K, NEW)
        seen = compare(model, prompts(), mine, theirs["outputs"])
        good = seen.lossless and (
            seen.near_ties > 0 or all(counted[c] == theirs[c] for c in COUNTERS)
        )
        found = f"{seen.same}/{len(mine)} texts, {'/'.join(str(theirs[c]) for c in COUNTERS[:3])}"
        if not good:
            found += " where ours are " + "/".join(str(counted[c]) for c in COUNTERS[:3])
        rows.append(
            row
            | {
                "agrees": good and theirs["num_accepted_tokens"] > 0,
                "found": found,
                "same": seen.same,
                "near_ties": seen.near_ties,
                "per_position": theirs["accepted_per_position"],
                "ours": counted,
                "vllm": {c: theirs[c] for c in COUNTERS},
            }
        )
    return rows


def dtype_of(folder: Path) -> str:
    raw = json.loads((folder / "config.json").read_text())
    return raw.get("dtype") or raw.get("torch_dtype") or "float32"


# ---------------------------------------------------------------- speculators


def check_logits(case: Case, args) -> dict:
    head = load_drafter(case.folder, dtype=np.float32, embedding=embedding())
    cfg, rng, n = head.config, np.random.default_rng(1), 24
    anchor, depth = np.arange(n), np.zeros(n, int)
    if cfg.parallel:
        kept = np.arange(n - K)
        for d in range(
            1, K
        ):  # chains are nested: who is kept at one depth was kept at the depth before
            kept = np.sort(rng.permutation(kept)[: n - K - 2 * d])
            anchor, depth = (
                np.concatenate([anchor, kept]),
                np.concatenate([depth, np.full(len(kept), d)]),
            )
    inputs = {
        "tokens": rng.integers(5, cfg.vocab, (1, n)),
        "taps": rng.normal(0, 2, (1, n, len(cfg.aux_hidden_state_layers) * cfg.target_dim)).astype(
            np.float32
        ),
        "hidden": rng.normal(size=(1, n, cfg.target_dim)).astype(np.float32),
        "supervised": np.ones((1, n), bool),
        "anchor": anchor,
        "depth": depth,
        "depths": K if cfg.parallel else 1,
    }
    asked, answer = args.out / f"{case.head}-inputs.npz", args.out / f"{case.head}-logits.npz"
    np.savez(asked, **inputs)
    row = {
        "peer": "speculators",
        "head": case.head,
        "layout": case.checkpoint_format,
        "route": case.route,
        "dtype": dtype_of(case.folder),
    }
    done = peer(args, "logits", case.folder, asked, answer)
    if done.returncode:
        return row | {
            "agrees": False,
            "found": (done.stderr.strip().splitlines() or ["nothing said"])[-1],
        }
    theirs = np.load(answer)["arr_0"][0]
    error = float(np.abs(our_logits(head, inputs) - theirs).max() / np.abs(theirs).max())
    return row | {
        "agrees": error < LOGITS,
        "found": f"logits differ by {error:.1e}",
        "error": error,
    }


def our_logits(head: Model, inputs: dict) -> np.ndarray:
    """Of packed (anchor, depth) elements, depth 0 first and then as speculators packs them: depth by depth."""
    tokens, aux_hidden_state_layers = jnp.asarray(inputs["tokens"]), jnp.asarray(inputs["taps"])
    n, deep = tokens.shape[1], inputs["depth"] > 0
    order = np.lexsort((inputs["depth"][deep], inputs["anchor"][deep]))  # ours: anchor by anchor
    anchor, depth = (
        jnp.asarray(inputs[name][deep][order][None], jnp.int32) for name in ("anchor", "depth")
    )
    here, segment_ids = jnp.arange(n)[None], jnp.zeros((1, n), jnp.int32)

    @jax.jit
    def run(params):
        module = head.bind(params)
        rows, aux_hidden_states, positions, attend = (
            module.embed(tokens),
            module.fuse(aux_hidden_state_layers),
            here,
            PackedCausal(segment_ids),
        )
        if head.config.parallel:
            last = (
                jnp.take_along_axis(x, anchor[..., None], axis=1) for x in (rows, aux_hidden_states)
            )
            mask, feature = placeholders.rows(module, placeholders.Slot(depth, *last))
            rows, aux_hidden_states = (
                jnp.concatenate([rows, mask], 1),
                jnp.concatenate([aux_hidden_states, feature], 1),
            )
            positions, attend = (
                jnp.concatenate([here, anchor + depth], 1),
                PrefixChain(anchor, depth, segment_ids, K),
            )
        hidden, _ = module(rows, aux_hidden_states, positions, attend, None)
        return module.compute_logits(hidden[0])

    result = np.array(run(head.params))
    result[n:] = result[n:][np.argsort(order)]
    return result


def train(name: str, args) -> Path:
    """A few steps of speculators' own training on our target's hidden states, saved by speculators."""
    start = args.out / f"{TRAINED[name]}-B"
    if not start.exists():
        write(TRAINED[name], args.out)
    data, out = args.out / f"{name}-data.npz", args.out / name
    np.savez(
        data,
        **training_data(
            tuple(load_drafter(start, embedding=embedding()).config.aux_hidden_state_layers)
        ),
    )
    done = peer(args, "train", start, data, out, 24)
    if done.returncode:
        raise SystemExit(f"speculators failed to train {name}:\n{done.stderr[-2000:]}")
    Console().print(done.stdout.strip())
    return out


@functools.cache
def training_data(aux_hidden_state_layers: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Text of our target with its taps and its last hidden states before the final norm, shifted as heads are trained."""
    model = target((*aux_hidden_state_layers, target(()).config.layers))
    texts, _ = ours(target(()), None, standard_prompts(text.load_tokenizer(TARGET), 12), 0, LENGTH)
    tokens = jnp.asarray([t[:LENGTH] for t in texts])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    attend = PackedCausal(jnp.zeros_like(tokens))
    out, _ = jax.jit(lambda p: model.bind(p)(tokens, positions, attend, None))(model.params)
    aux_hidden_states = np.asarray(out.aux_hidden_states)
    width = aux_hidden_states.shape[-1] // (len(aux_hidden_state_layers) + 1)
    loss_mask = np.ones((len(texts), LENGTH - 1), bool)
    loss_mask[:, 0] = False  # speculators 0.9 gives position 0 the anchor -1
    return {
        "tokens": np.asarray(tokens[:, 1:], np.int64),
        "taps": aux_hidden_states[:, :-1, : width * len(aux_hidden_state_layers)],
        "hidden": aux_hidden_states[:, 1:, width * len(aux_hidden_state_layers) :],
        "supervised": loss_mask,
        "depths": np.array(K),
    }


def peer(args, *words) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("speculators_peer.py")
    return subprocess.run(
        [args.speculators / "bin/python", script, *map(str, words)], capture_output=True, text=True
    )


def show(rows: list[dict]) -> None:
    table = Table(
        "peer", "head", "layout", "came as", "dtype", "found", "accepted per position", "agrees"
    )
    for row in rows:
        per = " ".join(str(int(n)) for n in row.get("per_position", []))
        table.add_row(
            *(row[key] for key in ("peer", "head", "layout", "route", "dtype", "found")),
            per,
            "yes" if row["agrees"] else "NO",
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    sys.exit(main())
