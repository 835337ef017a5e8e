"""A target with heads that fit it or not, and a way to run one command."""

import shlex

import pytest
import tiny

from peagle_jax import text
from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.checkpoints.target_io import save_target
from peagle_jax.cli import main

VOCAB = 300


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Checkpoints: a target with a tokenizer, heads that fit it, and some that do not."""
    root = tmp_path_factory.mktemp("cli")
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], VOCAB)
    tokenizer.save_pretrained(root / "tokenizer")
    vocab = len(tokenizer)
    target = tiny.target(vocab=vocab, context=300)
    save_target(target, root / "target", tokenizer_from=root / "tokenizer")
    save_target(tiny.target(vocab=43), root / "few_rows", tokenizer_from=root / "tokenizer")
    heads = {
        "peagle": tiny.head(vocab=vocab, draft_vocab=vocab),
        "eagle3": tiny.head(vocab=vocab, draft_vocab=vocab, mask_token=None),
        "eagle": tiny.head(**tiny.EAGLE, vocab=vocab, draft_vocab=vocab),
        "wide": tiny.head(vocab=vocab, draft_vocab=vocab, target_dim=25),
        "other_vocab": tiny.head(vocab=43, draft_vocab=43),
        "high_layer": tiny.head(vocab=vocab, draft_vocab=vocab, aux_hidden_state_layers=(1, 2, 9)),
    }
    for name, head in heads.items():
        save_drafter(head, root / name)
    (root / "prompts.jsonl").write_text(
        '{"prompt": "def f"}\n{"prompt_token_ids": [9, 8, 7]}\n{"turns": ["hi"]}\n'
    )
    return root


@pytest.fixture
def peagle(capsys, monkeypatch):
    """Runs a command in this process: a line as in a shell -> exit code, stdout, stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it for its workers

    def run(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
