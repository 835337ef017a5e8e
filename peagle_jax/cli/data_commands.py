"""`peagle show-data`: what of a corpus is trained."""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator

from rich.text import Text

from peagle_jax.cli.arguments import check_at_least, parse_template_kwargs
from peagle_jax.cli.output import print_marked, say

TRAINED = "bold green"
# around what is trained, where there are no colours
BEGIN, END = "⟦", "⟧"


def show_data(arguments: argparse.Namespace) -> int:
    """Prints documents as the target's chat template renders them, and what of them is trained."""
    from peagle_jax import corpus, text, weights
    from peagle_jax.documents import BadRows
    from peagle_jax.types import InputError

    if arguments.limit is not None:
        check_at_least("--limit", arguments.limit, 1)
    folder = weights.find_folder(arguments.target, weights.TOKENIZER_FILES)
    tokenizer = text.load_tokenizer(folder)
    if tokenizer is None:
        rule, next_step = "needs a tokenizer", "copy tokenizer.json into the target's folder"
        raise InputError(folder, rule, "no tokenizer.json", next_step)
    bad_rows = BadRows(arguments.bad_rows)
    of_template = parse_template_kwargs(arguments.chat_template_kwargs, tokenizer)
    how = of_template, arguments.special_tokens, arguments.split_turns
    documents = corpus.stream_corpus(arguments.data, bad_rows, *how)
    num_shown = num_trained = num_tokens = 0
    for document in itertools.islice(documents, arguments.limit):
        if (encoded := text.encode_or_take(tokenizer, document, bad_rows)) is None:
            continue
        num_shown += 1
        num_tokens += len(encoded.tokens)
        num_trained += int(encoded.loss_mask.sum())
        if arguments.json:
            trained = [encoded.text[start:end] for start, end in encoded.trained]
            say(json.dumps({"text": encoded.text, "trained": trained}, ensure_ascii=False))
        elif sys.stdout.isatty():
            print_marked(_coloured(document.name, encoded.text, encoded.trained))
        else:
            say(f"--- {document.name}")
            say("".join(_with_brackets(encoded.text, encoded.trained)))
    bad_rows.report(lambda line: print(line, file=sys.stderr))
    if not arguments.json:
        share = num_trained / max(num_tokens, 1)
        say(f"{num_shown:,} documents, {num_tokens:,} tokens, {share:.1%} of them trained")
    return 0


def _coloured(name: str, text: str, trained: list[tuple[int, int]]) -> Text:
    shown = Text(text)
    for start, end in trained:
        shown.stylize(TRAINED, start, end)
    return Text.assemble((f"--- {name}\n", "dim"), shown)


def _with_brackets(text: str, trained: list[tuple[int, int]]) -> Iterator[str]:
    done = 0
    for start, end in trained:
        yield f"{text[done:start]}{BEGIN}{text[start:end]}{END}"
        done = end
    yield text[done:]
