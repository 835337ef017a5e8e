"""Do the tests notice the mistakes that matter? Makes chosen ones, one at a time.

    .venv/bin/python scripts/measure/mutants_by_hand.py [--only NAME ...]
        [--record results/mutants_by_hand.jsonl]

Each is made in a copy of the checkout, and the tests of its own place run there, without the long
ones. Small mistakes drawn at random: scripts/measure/mutants.py. scripts/generate/support_table.py
shows the rows in docs/mutations.md. Exit code 1 if one is not noticed.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "measure"))

from mutants import run_tests  # noqa: E402

SECONDS = 1800  # for the tests of one mistake


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One change of one file, and the tests that are to notice it."""

    file: str  # under peagle_jax
    before: str
    after: str
    tests: str  # under tests; a name of pytest's


MISTAKES = {
    "temperature squared": Mistake(
        "decode/sampling.py",
        "sampling.temperature[:, None], 1)",
        "sampling.temperature[:, None] ** 2, 1)",
        "decode/test_sampling.py::test_probabilities_by_their_definition",
    ),
    "filters before temperature": Mistake(
        "decode/sampling.py",
        "        scaled = _filter(scaled, sampling.top_k, sampling.top_p)",
        "        scaled = _filter(logits, sampling.top_k, sampling.top_p) / "
        "jnp.where(is_sampled, sampling.temperature[:, None], 1)",
        "decode/test_sampling.py::test_probabilities_by_their_definition",
    ),
    "top-p before top-k renormalizes": Mistake(
        "decode/sampling.py",
        "    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)\n\n"
        "    probs = jax.nn.softmax(ranked, axis=-1)",
        "    probs = jax.nn.softmax(ranked, axis=-1)\n"
        "    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)",
        "decode/test_sampling.py::test_probabilities_by_their_definition",
    ),
    "a stop token past the limit": Mistake(
        "decode/commit.py",
        "is_emitted & (index < max_new_tokens[:, None])",
        "is_emitted",
        "decode/test_lossless.py::test_a_stop_token_past_the_limit",
    ),
    "the head's cache K slots short": Mistake(
        "decode/prefill.py",
        "spec.drafter.init(batch, slots + spec.k)",
        "spec.drafter.init(batch, slots)",
        "decode/test_drafting.py decode/test_lossless.py decode/test_growing_caches.py",
    ),
    "a ring that ignores K + 1": Mistake(
        "decode/spec.py",
        "return max(self.chunk, self.num_ahead)",
        "return self.chunk",
        "decode/test_every_family.py::test_a_ring_holds_a_block_of_drafts",
    ),
    "GPT-OSS's sinks in training attention": Mistake(
        "train/attention.py",
        "return with_sinks(y, lse, rule.sinks), {",
        "return y, {",
        "train/test_attention.py::test_sinks_take_their_share",
    ),
    "hits unweighted by the mask": Mistake(
        "train/loss.py",
        "by_depth(weight * is_correct, depth)",
        "by_depth(1.0 * is_correct, depth)",
        "train/test_loss.py",
    ),
    "clipping removed": Mistake(
        "train/update.py",
        "return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), steps)",
        "return steps",
        "train/test_optimizer.py",
    ),
    "warm-up removed": Mistake(
        "train/update.py",
        "        init_value=0,",
        "        init_value=config.peak_lr,",
        "train/test_optimizer.py",
    ),
    "one order in every epoch": Mistake(
        "train/data.py",
        "np.random.default_rng([seed, epoch])",
        "np.random.default_rng([seed, 0])",
        "train/test_packing.py",
    ),
    "draft vocabulary counts unsupervised tokens": Mistake(
        "train/data.py",
        "np.bincount(batch.tokens[batch.loss_mask], minlength=vocab)",
        "np.bincount(batch.tokens.ravel(), minlength=vocab)",
        "train/test_packing.py",
    ),
    "RMSNorm rounds late in bfloat16": Mistake(
        "layers/basic.py",
        "along_last(self.scale[...], rows) * normalize(rows, self.eps).astype(x.dtype)",
        "(along_last(self.scale[...].astype(jnp.float32), rows) * normalize(rows, self.eps))"
        ".astype(x.dtype)",
        "targets/test_norms.py",
    ),
    "a kernel that writes into a copy of the cache": Mistake(
        "kernels/cache_write_triton.py",
        "input_output_aliases={3 + i: i for i in range(len(cache))}",
        "input_output_aliases={}",
        "kernels/test_cache_write.py",
    ),
}


def notices(copy: Path, mistake: Mistake) -> bool:
    """Whether a test fails with a mistake in the copy, which is whole again afterwards."""
    path = copy / "peagle_jax" / mistake.file
    source = path.read_text(encoding="utf-8")
    if source.count(mistake.before) != 1:
        raise SystemExit(f"{mistake.file} has changed: {mistake.before!r} stands there no more")
    path.write_text(source.replace(mistake.before, mistake.after), encoding="utf-8")
    try:
        tests = [f"tests/{name}" for name in mistake.tests.split()]
        return run_tests(copy, "not long and not peer", tests, SECONDS)
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=MISTAKES, metavar="NAME")
    parser.add_argument("--record", type=Path, help="JSONL to append to (default: print only)")
    args = parser.parse_args()
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    of_this = provenance(" ".join(["python scripts/measure/mutants_by_hand.py", *sys.argv[1:]]))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for name in args.only or MISTAKES:
            mistake = MISTAKES[name]
            is_noticed = notices(copy, mistake)
            survivors += not is_noticed
            print(f"{name}: {'noticed' if is_noticed else 'NOT NOTICED'}", flush=True)
            row = {"name": "mutants_by_hand", **of_this, "mistake": name, "noticed": is_noticed}
            row |= {"file": mistake.file, "tests": mistake.tests}
            if args.record is not None:
                append_line(args.record, json.dumps(row))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
