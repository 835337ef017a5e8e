"""What the tests of `peagle extract` share, computed once."""

import pytest
from features import TEXTS, options, write_corpus, write_target

from peagle_jax import text
from peagle_jax.pipelines.extract import extract_hidden_states


@pytest.fixture(scope="session")
def tokenizer():
    return text.train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="session")
def place(tmp_path_factory, tokenizer):
    """A corpus, a target, and a finished folder `whole` of its hidden states.

    It has 4 shards of 10 rows and one of fewer, computed in batches of 3 rows.
    """
    root = tmp_path_factory.mktemp("extract")
    write_corpus(root / "corpus.jsonl")
    write_target(root / "target", tokenizer)
    extract_hidden_states(
        root / "target", options(root), root / "whole", lambda line: None, command="peagle extract"
    )
    return root
