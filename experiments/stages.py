"""What runs share: text, target, its answers, their hidden states, prompts. Each is made once, and found again by the hash of its
configuration and of the code that makes it."""

import ast
import dataclasses
import functools
import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments import texts
from experiments.budgets import Answers, Budget
from peagle_jax import corpus, text
from peagle_jax.atomic_write import write_atomically
from peagle_jax.checkpoints.target_io import load_target
from peagle_jax.pipelines.extract import Extraction, extract_hidden_states
from peagle_jax.pipelines.regenerate import Regeneration, regenerate
from peagle_jax.train.config import DataConfig, LmRun, OptimizerConfig
from peagle_jax.train.pretrain import held_out_bits, train_lm
from peagle_jax.types import InputError

ROOT = Path(__file__).parent.parent
DONE = "stage.json"
HELD_OUT = 0.05  # share of modules no model is trained on
DECODING = (
    "peagle_jax/decode",
    "peagle_jax/layers",
    "peagle_jax/kernels/attention.py",
    "peagle_jax/targets/qwen3.py",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One folder of the cache. `code`: the files and folders whose meaning decides what comes out."""

    name: str
    config: dict
    code: tuple[str, ...]
    parents: tuple["Stage", ...]
    size: int  # bytes that it will take, about
    make: Callable[
        [Path, Sequence[Path], Callable[[str], None]], None
    ]  # (own folder, the parents', say)

    @property
    def key(self) -> str:
        facts = [
            self.name,
            self.config,
            code_hash(self.code),
            [parent.key for parent in self.parents],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def folder(self, cache: Path) -> Path:
        return cache / f"{self.name}-{self.key}"

    def all(self) -> list["Stage"]:
        """Itself behind everything that it needs, each once."""
        out: dict[str, Stage] = {}
        for stage in (s for parent in self.parents for s in parent.all()):
            out.setdefault(stage.key, stage)
        return [*out.values(), self]


@functools.cache
def code_hash(code: tuple[str, ...]) -> str:
    """Of what the code does: comments, docstrings and layout do not count. `file.py:name` is one function of a file."""
    digest = hashlib.sha256()
    for name in sorted(code):
        path, _, function = name.partition(":")
        for file in [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            if function:
                tree = next(
                    node
                    for node in tree.body
                    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == function
                )
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if (
                    isinstance(body, list)
                    and body
                    and isinstance(body[0], ast.Expr)
                    and isinstance(body[0].value, ast.Constant)
                ):
                    node.body = body[1:] or [ast.Pass()]
            digest.update(f"{file.name}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:12]


def missing(stages: Sequence[Stage], cache: Path) -> list[Stage]:
    """Those that have to be made, in order."""
    out = {
        stage.key: stage
        for wanted in stages
        for stage in wanted.all()
        if not (stage.folder(cache) / DONE).exists()
    }
    return list(out.values())


def prepare(stages: Sequence[Stage], cache: Path, say: Callable[[str], None] = print) -> None:
    """Makes what is missing. A stage that was cut short goes on where it stopped; one whose code or configuration changed is made anew.

    Raises:
      InputError: the disk has too little room for what is to be made.
    """
    todo = missing(stages, cache)
    check_room(todo, cache)
    wanted = {
        stage.folder(cache).name for one in stages for stage in one.all()
    }  # several of one name are not each other's old selves
    for stage in todo:
        own = stage.folder(cache)
        stale = sorted(
            p.name
            for p in cache.glob(f"{stage.name}-*")
            if p.name not in wanted and (p / DONE).exists()
        )
        if stale:
            say(
                f"{stage.name}: {', '.join(stale)} {'is' if len(stale) == 1 else 'are'} of other settings, parents or code; made anew"
            )
        say(f"{own.name}: being made")
        own.mkdir(parents=True, exist_ok=True)
        stage.make(own, [parent.folder(cache) for parent in stage.parents], say)
        facts = {
            "name": stage.name,
            "config": stage.config,
            "code": code_hash(stage.code),
            "parents": [p.key for p in stage.parents],
        }
        write_atomically(own / DONE, json.dumps(facts, indent=2) + "\n")


def check_room(todo: Sequence[Stage], cache: Path, heads: int = 0) -> None:
    """`heads`: bytes of the heads that will be trained, about."""
    needed = sum(stage.size for stage in todo) + heads
    place = next(p for p in (cache.absolute(), *cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        names = ", ".join(
            f"{name} {size / 1e9:.1f}"
            for name, size in [*((s.name, s.size) for s in todo), ("heads", heads)]
            if size
        )
        raise InputError(
            cache,
            f"what is to be cached takes {needed / 1e9:.1f} GB ({names})",
            f"{free / 1e9:.1f} GB free",
            "make room, or name another place with --cache",
        )


# ---------------------------------------------------------------- the stages


def text_stage(budget: Budget) -> Stage:
    """train.jsonl and held_out.jsonl: texts of every kind, `chars` of each."""

    def make(own: Path, parents, say) -> None:
        sides = zip(
            ("train", "held_out"), corpus.split(corpus.read_corpus(None), HELD_OUT), strict=True
        )
        for side, modules in sides:
            chars = (
                budget.chars
                if side == "train"
                else budget.chars and max(budget.chars // 8, 100_000)
            )
            rows = [
                {"name": d.name, "kind": kind, "text": d.text}
                for kind, documents in texts.by_kind(modules).items()
                for d in corpus.limit(documents, chars, 0)
            ]
            write_atomically(own / f"{side}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    config = {
        "chars": budget.chars,
        "held_out": HELD_OUT,
        "python": platform.python_version(),
    }  # whose library it is
    code = ("experiments/stages.py:text_stage", "experiments/texts.py", "peagle_jax/corpus.py")
    return Stage("text", config, code, (), 8 * (budget.chars or 30_000_000), make)


def target_stage(budget: Budget) -> Stage:
    def run(own: Path, source: Path) -> LmRun:
        how = OptimizerConfig(
            steps=budget.lm_steps,
            peak_lr=budget.lm_rate,
            warmup=budget.lm_steps // 20,
            weight_decay=0.1,
            max_grad_norm=1.0,
        )
        data = DataConfig(
            source=str(source),
            max_chars=None,
            held_out=0.02,
            seq_len=budget.lm_length,
            batch_size=budget.lm_rows,
        )
        return LmRun(
            task="lm",
            out=str(own),
            seed=0,
            model=budget.model,
            data=data,
            optimizer=how,
            log_every=max(1, budget.lm_steps // 40),
            save_every=max(1, budget.lm_steps // 8),
            max_seconds=None,
        )

    def make(own: Path, parents, say) -> None:
        result = train_lm(run(own, parents[0] / "train.jsonl"), say)
        tokenizer = text.load_tokenizer(result.folder)
        held_out = corpus.read_corpus(parents[0] / "held_out.jsonl")
        bits = held_out_bits(
            load_target(result.folder, aux_hidden_state_layers=()),
            tokenizer,
            held_out,
            budget.lm_length,
        )
        say(f"target: {result.parameters:,} parameters, {bits:.3f} bits a byte on held-out modules")

    config = dataclasses.asdict(run(Path("."), Path("train.jsonl")))
    code = (
        "experiments/stages.py:target_stage",
        "peagle_jax/train/pretrain.py",
        "peagle_jax/train/trainer.py",
        "peagle_jax/train/data.py",
        "peagle_jax/train/attention.py",
        "peagle_jax/text.py",
        "peagle_jax/layers",
        "peagle_jax/targets/qwen3.py",
    )
    m = budget.model
    parameters = 2 * m.vocab * m.dim + m.layers * (
        2 * m.dim * m.head_dim * (m.heads + m.kv_heads) + 3 * m.dim * m.mlp_dim
    )
    return Stage("target", config, code, (text_stage(budget),), 4 * 7 * parameters, make)


def answers_stage(budget: Budget, answers: Answers) -> Stage:
    """answers.jsonl: what the target writes, or excerpts of the corpus of the same length."""

    def make(own: Path, parents, say) -> None:
        source, target = parents[0] / "train.jsonl", parents[1] / "model"
        more = {
            "source": str(source),
            "held_out": 0.0,
            "answers": answers.count,
            "batch_size": 128,
            "seed": 0,
        }
        if answers.temperatures:
            sizes = {"prompt_tokens": answers.prompt_tokens, "new_tokens": answers.new_tokens}
            how = Regeneration(temperatures=answers.temperatures, **sizes, **more)
            regenerate(target, how, own / "answers.jsonl", say)
            return
        from peagle_jax.pipelines.regenerate import excerpts_of

        how = Regeneration(
            prompt_tokens=answers.prompt_tokens + answers.new_tokens,
            new_tokens=1,
            temperatures=(0.0,),
            **more,
        )
        excerpts = excerpts_of(text.load_tokenizer(target), corpus.read_corpus(source), how)
        rows = [
            {
                "prompt_token_ids": e[: answers.prompt_tokens],
                "output_token_ids": e[answers.prompt_tokens :],
            }
            for e in excerpts
        ]
        write_atomically(own / "answers.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    size = 8 * answers.count * (answers.prompt_tokens + answers.new_tokens)
    code = (
        "experiments/stages.py:answers_stage",
        *DECODING,
        "peagle_jax/pipelines/regenerate.py",
        "peagle_jax/text.py",
        "peagle_jax/corpus.py",
    )
    return Stage(
        "answers",
        dataclasses.asdict(answers),
        code,
        (text_stage(budget), target_stage(budget)),
        size,
        make,
    )


def features_stage(budget: Budget, answers: Answers, length: int) -> Stage:
    """The base's taps, and final hidden states, of every row of answers. Rows shorter than an answer cut it, for the target too."""
    aux_hidden_state_layers = budget.aux_hidden_state_layers
    config = {"taps": aux_hidden_state_layers, "length": length, "dtype": budget.stored}

    def make(own: Path, parents, say) -> None:
        how = Extraction(
            source=str(parents[1] / "answers.jsonl"),
            length=length,
            aux_hidden_state_layers=aux_hidden_state_layers,
            batch=16,
            rows_per_shard=None,
            dtype=budget.stored,
            compute_dtype="float32",
            max_chars=None,
            held_out=0.0,
            seed=0,
        )
        extract_hidden_states(
            parents[0] / "model", how, own / "features", say, command="python -m experiments.run"
        )

    tokens = answers.count * (answers.prompt_tokens + answers.new_tokens)
    size = tokens * (
        9
        + (4 if budget.stored == "float32" else 2)
        * (len(aux_hidden_state_layers) + 1)
        * budget.model.dim
    )
    code = (
        "experiments/stages.py:features_stage",
        "peagle_jax/pipelines/extract.py",
        "peagle_jax/train/hidden_states.py",
        "peagle_jax/train/attention.py",
        "peagle_jax/train/data.py",
        "peagle_jax/layers",
        "peagle_jax/targets/qwen3.py",
        "peagle_jax/text.py",
    )
    return Stage(
        "features", config, code, (target_stage(budget), answers_stage(budget, answers)), size, make
    )


def prompts_stage(budget: Budget, tokens: int) -> Stage:
    """prompts.jsonl: `budget.prompts` excerpts of held-out text of every kind, from a quarter of their document on."""

    def make(own: Path, parents, say) -> None:
        tokenizer = text.load_tokenizer(parents[1] / "model")
        rows = [row for _, row in corpus.read_jsonl(parents[0] / "held_out.jsonl")]
        picked = []
        for kind in texts.KINDS:
            ids = tokenizer(
                [row["text"] for row in rows if row["kind"] == kind], add_special_tokens=False
            )["input_ids"]
            ids = [i for i in ids if len(i) > tokens]
            if len(ids) < budget.prompts:
                rule = f"{budget.prompts} held-out texts of more than {tokens} tokens are needed of kind {kind}"
                raise InputError(
                    own, rule, len(ids), "use a Python with more of its library, or shorter prompts"
                )
            for i in range(budget.prompts):
                whole = ids[i * len(ids) // budget.prompts]
                start = min(len(whole) // 4, len(whole) - tokens)
                picked.append({"kind": kind, "prompt_token_ids": whole[start : start + tokens]})
        write_atomically(own / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in picked))

    config = {"tokens": tokens, "each": budget.prompts}
    parents = (text_stage(budget), target_stage(budget))
    code = ("experiments/stages.py:prompts_stage", "experiments/texts.py", "peagle_jax/text.py")
    return Stage("prompts", config, code, parents, 10_000_000, make)
