"""`peagle init-config`: recipes that fit every family and the corpus, and that train as written."""

import itertools
import json

import jax.numpy as jnp
import pytest
import test_runs
import tokenizers
import yaml
from transformers import PreTrainedTokenizerFast

from peagle_jax import text
from peagle_jax.cli import main
from peagle_jax.pipelines.tracing import abstract_target
from peagle_jax.train.config import load_run
from peagle_jax.train.head_config import head_config
from peagle_jax.train.new_recipe import _quoted, new_recipe
from peagle_jax.types import InputError

corpus, target = test_runs.corpus, test_runs.target  # fixtures


def write(tmp_path, recipe):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    return load_run(path)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """190 short ones and one of which only a half fits into a row."""
    rows = [(f"add {i}", f"x = 1 + {i}") for i in range(190)]
    rows += [(f"go {i}", "y = 2\n" * 900) for i in range(2)]
    messages = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows
    ]
    path = tmp_path_factory.mktemp("data") / "chat data.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
    return path


def test_what_it_writes_is_a_recipe_that_trains(corpus, target, tmp_path, capsys):
    """From the command line, at the sizes that it chose, but for two steps only."""
    path = tmp_path / "sub" / "head.yaml"
    words = ["init-config", "--target", str(target), "--data", str(corpus), "--out", str(path)]
    assert main(words) == 0
    assert f"peagle train {path}" in capsys.readouterr().out
    recipe = path.read_text()
    assert max(map(len, recipe.splitlines())) <= 100 + len(str(target)) + len(str(corpus))
    run = load_run(path)
    assert run.out == str(tmp_path / "sub" / "head")
    assert (run.target, run.data.source) == (str(target), str(corpus))
    assert run.init == "target" and run.head.qk_norm  # as Qwen3 has
    assert (run.num_depths, run.eval.keep) == (8, "best")
    assert run.head.aux_hidden_state_layers == (1, 2, 3)  # of four layers
    assert run.data.seq_len % 128 == 0 and run.data.seq_len * run.data.batch_size <= 8192 + 127
    assert [stage.num_depths for stage in run.depth_schedule] == [1, 2, 4]
    few = ["--optimizer.steps", "2", "--depth_schedule", "[]", "--eval.max_new_tokens", "4"]
    small = ["--head.mlp_dim", "16", "--data.batch_size", "2", "--eval.num_prompts", "1"]
    assert main(["train", str(path), *few, *small]) == 0
    assert (tmp_path / "sub" / "head" / "head" / "config.json").exists()

    assert main(words) == 2  # it is not overwritten
    assert "the recipe must be a new file" in capsys.readouterr().err
    assert path.read_text() == recipe
    words[-1] = str(tmp_path / "head")
    assert main(words) == 2
    assert f"--out: must be a YAML file; got {words[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["peagle", "eagle3", "eagle"])
@pytest.mark.parametrize("case", ["llama", "llama_tied", "qwen3", "qwen3_moe", "gpt_oss", "gemma4"])
def test_every_family(case, task, tmp_path):
    """The head's configuration follows from the recipe and the target without an error."""
    pytest.importorskip("torch")
    from tests.targets import families

    _, folder = families.make(case)
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 262)
    copy = tmp_path / "target"
    copy.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"vocab_size": 300}))
    for path in folder.glob("*.safetensors*"):
        (copy / path.name).write_bytes(path.read_bytes())
    tokenizer.save_pretrained(copy)
    (tmp_path / "data.jsonl").write_text('{"text": "def f(x): return x"}\n')
    run = write(tmp_path, new_recipe(str(copy), str(tmp_path / "data.jsonl"), task, "runs/x y"))
    assert (run.task, run.out) == (task, "runs/x y")
    aux_layers = run.aux_hidden_state_layers
    model = abstract_target(copy / "config.json", aux_hidden_state_layers=aux_layers)
    config = model.config
    head = head_config(run, model, tokenizer.mask_token_id)
    assert head.layers == (4 if task == "peagle" else 1)
    assert head.aux_hidden_state_layers == tuple(sorted(set(aux_layers)))
    expected = config.mlp_dim if case in ("llama", "llama_tied", "qwen3") else 3 * config.dim
    assert head.mlp_dim == expected
    assert head.qk_norm == case.startswith("qwen3")
    # a bias in attention cannot be copied
    assert run.init == ("target" if case == "llama_tied" else "random")


def tokenizer_of(names):
    """A tokenizer without a mask token."""
    words = tokenizers.models.WordLevel(names, unk_token="a")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))


def mask_token(tokenizer, vocab, *documents):
    from peagle_jax.train.new_recipe import _mask_token_lines

    return _mask_token_lines(vocab, tokenizer, set(itertools.chain(*documents)))[0]


def test_the_mask_token_is_one_that_no_text_has():
    names = {"a": 0, "<|reserved_3|>": 1, "b": 2, "<unused7>": 3, "c": 4}
    assert "mask_token: 5  #" in mask_token(tokenizer_of(names), 6, [0, 2], [4])
    assert "mask_token: 3  # in a placeholder's place: '<unused7>'" in mask_token(
        tokenizer_of(names), 5, [0], [2]
    )
    assert "mask_token: 1  #" in mask_token(tokenizer_of(names), 5, [0, 3])
    assert "mask_token: 4  #" in mask_token(tokenizer_of(names), 5, [0, 1], [3])
    assert "mask_token: 5  #" in mask_token(tokenizer_of(names), 7, [6])
    with pytest.raises(InputError, match="needs an id that no text has; got a corpus with every"):
        mask_token(tokenizer_of(names), 5, range(5))


def test_rows_follow_from_the_data(target, conversations, tmp_path):
    tokenizer = text.load_tokenizer(target)
    said = []
    conversations.write_text(conversations.read_text() + "no json\n")
    run = write(tmp_path, new_recipe(str(target), str(conversations), say=said.append))
    assert run.data.source == str(conversations)  # its name has a space
    assert len(said) == 1 and ":193: " in said[0] and said[0].startswith("skipped: ")
    assert run.data.bad_rows == "skip"  # what the recipe is made of can be trained on
    from peagle_jax.corpus import read_corpus
    from peagle_jax.documents import BadRows

    encoded = text.encode(tokenizer, read_corpus(conversations, BadRows("skip")))
    lengths = sorted(len(tokens) for tokens, _ in encoded)
    assert lengths[-3] < 128 < 1000 < lengths[-2]
    # 2 of 192 are more than one of a hundred, and the target's context is 4096
    assert run.data.seq_len == min(-(-lengths[-1] // 128) * 128, 4096)
    num_rows = sum(lengths) // run.data.seq_len
    assert run.data.batch_size == min(max(1, 8192 // run.data.seq_len), num_rows)
    assert run.optimizer.steps == max(200, 3 * num_rows // run.data.batch_size)
    assert jnp.isclose(run.optimizer.peak_lr, 3e-3)  # the most, for a target 32 wide


def test_what_cannot_be_used(target, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(InputError, match=r"q\.jsonl: something must be trained on; got none of"):
        new_recipe(str(target), str(questions), say=lambda _: None)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((target / "config.json").read_text())
    with pytest.raises(InputError, match=r"bare: needs a tokenizer; got no tokenizer\.json"):
        new_recipe(str(bare), str(questions))


@pytest.mark.parametrize("name", ["2024", "null", "yes", "1e3", 'a "b": c', "runs/x"])
def test_names_stay_names(name):
    """Some are numbers or something else in YAML."""
    assert yaml.safe_load(f"out: {_quoted(name)}") == {"out": name}
