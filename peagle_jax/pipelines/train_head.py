"""Trains a draft head on a target: P-EAGLE with COD sampling, or EAGLE-3 with test-time training."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax import corpus, text, weights
from peagle_jax.bench.suite import repeated_share
from peagle_jax.decode.generate import acceptance_length, check_prompts, generate
from peagle_jax.draft import expressing, folders, vocab
from peagle_jax.draft.head import HeadConfig, random_head
from peagle_jax.draft.start import start_from_head, start_from_target, start_placeholders
from peagle_jax.layers import Rope
from peagle_jax.pipelines.head_batches import HeadBatch, HeadBatches
from peagle_jax.pipelines.runs import open_head, start_run
from peagle_jax.targets import load_target
from peagle_jax.train.config import HeadRun, Llama3Rope, PeagleRun, Placeholder
from peagle_jax.train.data import PackedRows, pack
from peagle_jax.train.features import extract
from peagle_jax.train.fit import claim, fit, write_result
from peagle_jax.train.step import peagle_loss
from peagle_jax.train.ttt import eagle3_loss
from peagle_jax.types import InputError, Model

START_TOKENS = 8192  # whose mean taps placeholders may start from
PROMPT_TOKENS = 48  # tokens of an excerpt that the head is measured on


@dataclasses.dataclass(frozen=True)
class HeadResult:
    folder: Path  # in vLLM's layout; of placeholders that vLLM does not know, the run's own
    parameters: int
    step: int
    acceptance_length: float | None  # greedy, on held-out prompts, at the trained K
    accepted_per_position: list[float]  # share of drafts accepted at each position
    repeated_4grams: float  # share of the decoded text's 4-grams that it had written before
    tokens_per_second: float | None  # of training
    minutes: float  # of training, all sessions together


def train_head(run: HeadRun, say: Callable[[str], None] = print) -> HeadResult:
    """Target features online, training, export to `run.out`/head, and a greedy measurement on held-out documents.

    Raises:
      InputError: the target cannot be read, has no tokenizer, or does not fit the head's configuration.
    """
    claim(run)
    folder = weights.find_folder(run.target)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        raise InputError(
            run.target, "training on text needs the target's tokenizer", "no tokenizer.json", "copy it into the target's folder"
        )
    target = load_target(folder, taps=run.head.taps, dtype=jnp.dtype(run.target_dtype))
    text.check_vocabulary(tokenizer, target.config.vocab, run.target)
    documents = corpus.read_corpus(run.data.source)
    train, held_out = corpus.split(documents, run.data.held_out)
    encoded = text.encode(tokenizer, corpus.limit(train, run.data.max_chars, run.seed))
    rows = pack(encoded, run.data.length, run.data.source)
    say(f"corpus: {len(encoded)} documents, {rows.tokens.size:,} tokens; {len(held_out)} documents held out")
    batches = HeadBatches(run, rows, target)
    head = new_head(run, target, rows, tokenizer)
    say(f"head: {sum(x.size for x in jax.tree.leaves(head.params)):,} parameters, taps {list(target.config.taps)}")

    trained, frozen = _split(run, head)
    loss = functools.partial(head_loss, run, target, head)
    prompts = measured_prompts(run, tokenizer, held_out)
    if prompts:
        check_prompts(prompts, target.config, run.measure.new_tokens, run.most_depths, None)
    else:
        say("nothing is held out that could be a prompt: acceptance is not measured (data.held_out, or measure.prompts)")
    start_run(head, frozen, Path(run.out))
    whole = lambda params: dataclasses.replace(head, params={**params, **frozen})  # noqa: E731

    def probe(step: int, params) -> dict | None:
        if run.measure.every is None or not prompts or step % run.measure.every:
            return None
        return acceptance(target, whole(params), prompts, run.most_depths, run.measure.new_tokens)

    done = fit(run, trained, loss, batches, (target.params, frozen), probe)
    head = whole(done.params)
    folder = _export(run, head, done.step, say)
    found = acceptance(target, head, prompts, run.most_depths, run.measure.new_tokens)
    parameters = sum(x.size for x in jax.tree.leaves(head.params))
    speed = done.tokens / done.seconds if done.tokens else None
    result = HeadResult(folder, parameters, done.step, **found, tokens_per_second=speed, minutes=done.minutes)
    write_result(run, vars(result))
    return result


def _export(run: HeadRun, head: Model, step: int, say) -> Path:
    """`run.out`/head in vLLM's layout; or, for placeholders that vLLM does not know, the run itself, which decodes here."""
    try:
        expressing.as_paper(folders.of_model(head))
    except InputError as error:
        say(f"no folder for vLLM is written: {error}")
        return Path(run.out)
    folder = Path(run.out) / "head"
    source = f"peagle train, task {run.task}, step {step}, seed {run.seed}, target {Path(run.target).name}"
    folders.save_drafter(head, folder, target=str(run.target), metadata={"source": source})
    return folder


def new_head(run: HeadRun, target: Model, rows: PackedRows, tokenizer) -> Model:
    """The head to train, as it starts."""
    config = head_config(run, target, tokenizer.mask_token_id)
    ids = None
    if config.draft_vocab != config.vocab:
        counts = np.bincount(rows.tokens[rows.supervised], minlength=config.vocab)
        ids = vocab.choose(counts, config.draft_vocab)
    module = target.bind(target.params)
    embedding, output = module.embed.table[...], module.output_weight()
    head = random_head(config, seed=run.seed, embedding=embedding, output=output, ids=ids)
    mean_taps = None
    if run.start == "target" or config.parallel and config.placeholder_hidden == "mean_feature":
        batch = rows.take(range(min(-(-START_TOKENS // run.data.length), len(rows))))
        taps, _ = extract(module, jax.tree.map(jnp.asarray, batch))
        mean_taps = jnp.mean(taps, axis=(0, 1), where=(batch.document >= 0)[..., None])
    if run.start == "target":
        head = start_from_target(head, target)
    trained = None if run.start_from is None else _trained(run.start_from, config.dtype, embedding)
    if trained is not None:
        head = start_from_head(head, trained, run.start_from)
    if config.parallel and not (trained is not None and trained.config.parallel):  # behind the embedding and fusion that they begin with
        head = start_placeholders(head, mean_taps, seed=run.seed)
    return head


def _trained(name: str, dtype, embedding) -> Model:
    """A head to go on from: a folder of any layout, a hub id, or a training run."""
    return folders.to_model(open_head(name), dtype=dtype, embedding=embedding)


def head_config(run: HeadRun, target: Model, mask_token: int | None) -> HeadConfig:
    """Nulls in the run's head take the target's value."""
    h, t = run.head, target.config
    pick = lambda mine, theirs: theirs if mine is None else mine  # noqa: E731
    head_dim = pick(h.head_dim, t.head_dim)
    if h.rope is None and 2 * len(t.rope.frequencies) != head_dim:
        rule = f"the target's rotary embedding turns heads of {2 * len(t.rope.frequencies)}"
        raise InputError("head.head_dim", rule, head_dim, "leave it null, or set head.rope")
    parallel = isinstance(run, PeagleRun)
    mask_token = pick(h.mask_token, mask_token)
    if parallel and mask_token is None:
        raise InputError(run.target, "P-EAGLE needs a mask token", "a tokenizer without one", "set head.mask_token to an unused id")
    if parallel and not 0 <= mask_token < t.vocab:
        raise InputError("head.mask_token", f"must lie in 0..{t.vocab - 1}", mask_token, "mend the config")
    if list(t.taps) != sorted(set(t.taps)):
        raise InputError("head.taps", "must ascend, as vLLM collects them", list(t.taps), "mend the config")
    if h.draft_vocab is not None and not 1 <= h.draft_vocab <= t.vocab:
        raise InputError("head.draft_vocab", f"must lie in 1..{t.vocab}", h.draft_vocab, "mend the config")
    design = run.placeholder if parallel else Placeholder(hidden="shared", token="mask")
    return HeadConfig(
        vocab=t.vocab, draft_vocab=pick(h.draft_vocab, t.vocab), dim=pick(h.dim, t.dim), layers=h.layers,
        mlp_dim=pick(h.mlp_dim, t.mlp_dim), heads=pick(h.heads, t.heads), kv_heads=pick(h.kv_heads, t.kv_heads),
        head_dim=head_dim, rope=t.rope if h.rope is None else _rope(h.rope, head_dim), norm_eps=t.norm_eps, context=t.context,
        target_dim=t.dim, taps=t.taps, mask_token=mask_token if parallel else None, depths=run.most_depths,
        placeholder_hidden=design.hidden, placeholder_token=design.token, qk_norm=h.qk_norm,
        attention_bias=False, norm_before_residual=h.norm_before_residual, norm_before_fc=h.norm_before_fc,
        fc_norm=h.fc_norm, norm_output=h.norm_output, windows=(None,) * h.layers, dtype=jnp.float32,
    )  # fmt: skip


def _rope(rope: Llama3Rope, head_dim: int) -> Rope:
    spec = {
        "rope_type": "llama3", "rope_theta": rope.theta, "factor": rope.factor, "low_freq_factor": rope.low, "high_freq_factor": rope.high,
        "original_max_position_embeddings": rope.original,
    }  # fmt: skip
    return Rope.from_hf({"rope_parameters": spec}, head_dim, "head.rope")


def _split(run: HeadRun, head: Model) -> tuple[dict, dict]:
    """(trained, frozen) top-level parts of the head's parameters; `d2t` is an integer table, never trained."""
    still = {"d2t"} | ({"embed"} if not run.train_embedding else set()) | ({"lm_head"} if not run.train_lm_head else set())
    return {k: v for k, v in head.params.items() if k not in still}, {k: v for k, v in head.params.items() if k in still}


def head_loss(run: HeadRun, target: Model, head: Model, params, batch: HeadBatch, fixed):
    """(loss, metrics) of one step; `params` are the trained parts, `fixed` the target's parameters and the head's other parts."""
    target_params, frozen = fixed
    module, reader = head.bind({**params, **frozen}), target.bind(target_params)
    rows, output = batch.rows(reader, target.config.dtype), reader.output_weight()
    if isinstance(run, PeagleRun):
        key = jax.random.fold_in(jax.random.key(run.seed), batch.step)
        loss, by_depth = peagle_loss(module, rows, batch.cod, batch.depths, output, reader.logit_cap, run.loss, run.blur, key)
    else:
        loss, by_depth = eagle3_loss(module, rows, batch.depths, run.ttt.decay, output, reader.logit_cap, run.loss)
    return loss, {"accuracy": by_depth["correct"] / jnp.maximum(by_depth["total"], 1)}


def held_out_prompts(tokenizer, documents, count: int, length: int) -> list[list[int]]:
    """The first tokens after a quarter of `count` long enough documents, spread over the corpus; there code is under way."""
    texts = [d.text for d in documents if d.text is not None and len(d.text) >= 4 * length]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    encoded = [ids for ids in encoded if len(ids) >= 4 * length]
    picks = [encoded[i * len(encoded) // count] for i in range(count)] if len(encoded) >= count else encoded
    return [list(ids[len(ids) // 4 :][:length]) for ids in picks]


def measured_prompts(run: HeadRun, tokenizer, held_out) -> list[list[int]]:
    if run.measure.prompts is not None:
        return text.read_prompts(Path(run.measure.prompts), tokenizer)[: run.measure.count]
    answers = [list(d.prompt_ids) for d in held_out if d.prompt_ids]
    return answers[: run.measure.count] or held_out_prompts(tokenizer, held_out, run.measure.count, PROMPT_TOKENS)


def acceptance(target: Model, head: Model, prompts, k: int, new_tokens: int) -> dict:
    """Acceptance length, share of drafts accepted at each position, and how much the text repeats itself; greedy, one batch."""
    if not prompts:
        return {"acceptance_length": None, "accepted_per_position": [], "repeated_4grams": 0.0}
    answers = generate(target, head, prompts, k=k, max_new_tokens=new_tokens, stop_ids=())
    accepted = np.sum([a.accepted_per_position for a in answers], axis=0) / max(sum(a.num_drafts for a in answers), 1)
    return {
        "acceptance_length": acceptance_length(answers), "accepted_per_position": np.round(accepted, 4).tolist(),
        "repeated_4grams": repeated_share([a.output_token_ids for a in answers]),
    }  # fmt: skip
