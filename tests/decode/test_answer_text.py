"""The text of an answer that is written in pieces is the text of its tokens."""

import dataclasses

import numpy as np
import pytest
from test_engine import Letters, make_engine, small_sizes  # noqa: F401 (a fixture)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax import text
from peagle_jax.decode.answer_text import AnswerText, TextStream
from peagle_jax.decode.requests import Request

SAMPLES = ["def f(x):\n    return x + 1\n", "äöü ß 漢字 🙂🙃 ", "a  b   c , d ."]


def with_bytes():
    """As GPT-2's and Qwen's: tokens may end within a character."""
    return text.train_tokenizer(SAMPLES * 20, 300)


def with_metaspace():
    """As Llama 2's: the text of the first token has no leading space; bytes where none fits."""
    pieces = ["▁", "▁de", "f", "▁x", "x", "a", "▁a", "b", "(", ")", "é"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocabulary |= {piece: 257 + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(" ", 1, 0)
    spaces = decoders.Replace("▁", " ")
    parts = [spaces, decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_word_pieces():
    """As BERT's: a space stands before what does not begin with ##."""
    pieces = ["[UNK]", "[SEP]", "un", "##able", "##s", "to", ",", "do"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="[SEP]")


@pytest.mark.parametrize("make", [with_bytes, with_metaspace, with_word_pieces])
def test_pieces_add_up(make):
    """Of random texts, and of random tokens, whose bytes are often no characters."""
    tokenizer, rng = make(), np.random.default_rng(0)
    letters = list("".join(SAMPLES))
    texts = ["".join(rng.choice(letters, 30)) for _ in range(60)]
    ids_of_texts = [tokenizer(text)["input_ids"] for text in texts]
    if make is not with_metaspace:  # there a byte without a character changes those before it
        ids_of_texts += [rng.integers(0, len(tokenizer), 40).tolist() for _ in range(60)]
    num_pieces = 0
    for ids in ids_of_texts:
        stream, begin, seen = TextStream(tokenizer), 0, ""
        while begin < len(ids):
            end = begin + int(rng.integers(1, 5))
            stream.add(ids[begin:end])
            assert stream.text.startswith(seen) and stream.num_tokens <= end
            num_pieces += stream.text != seen
            begin, seen = end, stream.text
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert whole.startswith(seen)
        # what is left may become another character by the next token
        assert "\ufffd" in whole[len(seen) :] or whole == seen
    assert num_pieces > 300


def test_a_token_is_decoded_a_few_times():
    """However long the answer is, and however many steps it takes."""
    decoded = []

    class Counting(Letters):
        def decode(self, token_ids, skip_special_tokens):
            decoded.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    answer = AnswerText(Counting(), Request(prompt=[1], stop=["ZZZ"], stream=True))
    ids = (np.arange(3_000) % 25).tolist()
    shown = ""
    for end in range(3, 3_001, 3):
        assert answer.read(ids[:end], is_done=False) is None
        shown += answer.news()
    assert max(decoded) == 6 and sum(decoded) < 4 * len(ids)
    assert answer.read(ids, is_done=True) is None
    assert shown + answer.news() == answer.text == Letters().decode(ids, True)
    assert len(shown) == len(ids) - 2  # "ZZ" may have begun


@pytest.mark.parametrize("stop", [None, "of its text", "never"])
def test_outputs_have_the_text_that_is_new(stop):
    request = Request(prompt=[3, 14, 15], max_new_tokens=60, stream=True)
    (whole,) = dict(make_engine(3, tokenizer=Letters()).run([request])).values()
    if stop is not None:
        stop = whole.text[21:24] if stop == "of its text" else "~~~"
        request = dataclasses.replace(request, stop=[stop])
    engine = make_engine(3, tokenizer=Letters(), max_batch=2)
    engine.add(request)
    engine.add(dataclasses.replace(request, stream=False))
    parts, ids, answers = {0: [], 1: []}, {0: [], 1: []}, {}
    while engine.has_work:
        for output in engine.step():
            parts[output.request_id].append(output.new_text)
            ids[output.request_id] += output.new_token_ids
            if output.answer is not None:
                answers[output.request_id] = output.answer
    assert answers[0] == answers[1]
    assert "".join(parts[0]) == answers[0].text and ids[0] == answers[0].output_token_ids
    assert parts[1] == [answers[0].text]
    assert len([part for part in parts[0] if part]) > 4
    end = whole.text.find(stop) if stop else -1
    assert answers[0].text == (whole.text if end < 0 else whole.text[:end])


def test_a_byte_that_fits_no_character_does_not_stop_the_search():
    """With SentencePiece's bytes it changes characters before it, which streams have shown."""
    tokenizer = with_metaspace()
    broken = [1 + 0xC3, 1 + 0xA9, 1 + 0xFF]
    assert tokenizer.decode(broken[:2]) == "é" and "é" not in tokenizer.decode(broken)
    words = tokenizer("def x")["input_ids"]
    answer = AnswerText(tokenizer, Request(prompt=[1], stop=["def"]))
    ids = [*broken, *words, *words]
    for end in range(1, len(ids) + 1):
        if found := answer.read(ids[:end], is_done=False):
            break
    assert found is not None and found.string == "def"
    fewest = next(n for n in range(len(ids)) if "def" in tokenizer.decode(ids[:n]))
    assert found.num_tokens == fewest == end


@pytest.mark.parametrize("num_more", [0, 1])
def test_half_a_character_behind_a_stop_string(num_more):
    """The answer has no token behind the string, in whatever steps it is read."""
    tokenizer = with_bytes()
    smile = tokenizer("🙂")["input_ids"]
    assert len(smile) > 1 and "\ufffd" in tokenizer.decode(smile[:-1])
    ids = [*tokenizer("return x")["input_ids"], *smile[:-1]]
    request = Request(prompt=[1], stop=["x"])
    in_one = AnswerText(tokenizer, request).read(ids, is_done=False)
    answer = AnswerText(tokenizer, request)
    ends = [3, len(ids)] if num_more else [len(ids), len(ids)]
    for end in ends:
        found = answer.read(ids[:end], is_done=end == len(ids))
        if found is not None:
            break
    assert found == in_one and "\ufffd" not in tokenizer.decode(ids[: found.num_tokens])
