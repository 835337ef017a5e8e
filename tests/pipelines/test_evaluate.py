"""Which prompts a run is measured on, and what a head of NaN comes to."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from peagle_jax import text
from peagle_jax.decode.generate import generate
from peagle_jax.decode.memory import LacksMemoryError
from peagle_jax.documents import Document
from peagle_jax.pipelines import evaluate
from peagle_jax.pipelines.evaluate import acceptance, eval_prompts
from peagle_jax.train.config import Eagle3Run
from peagle_jax.train.settings import build
from peagle_jax.types import InputError
from tests import tiny

RAW = {"target": "t", "out": "o", "data": {"source": "s"}, "eval": {"num_prompts": 4}}


def conversation(*roles, tools=()):
    messages = tuple({"role": role, "content": f"{role} x"} for role in roles)
    return Document("c", None, messages, tools=tools)


def test_conversations_are_asked_anew():
    tokenizer = text.train_tokenizer(["user x assistant"], 300)
    held_out = [
        conversation("user", "assistant", "user", "assistant"),
        conversation("system", "user"),
        conversation("assistant", "user"),  # a greeting: nobody has asked
        conversation("system"),
        Document("a", None, prompt="user", completion=" x"),
        Document("b", None, prompt="nobody answers"),
        Document("c", None, (), (7, 8), (9,)),
    ]
    run = build(Eagle3Run, RAW, "test")
    prompts = eval_prompts(run, tokenizer, held_out, 100)
    assert prompts[3] == [7, 8]
    # those that are too long for the target are passed over
    longest = len(prompts[0])
    assert eval_prompts(run, tokenizer, held_out, longest) == [prompts[0], *prompts[2:]]
    with pytest.raises(InputError, match="fit beside 96 new tokens; got 1 tokens"):
        eval_prompts(run, tokenizer, held_out, 0)
    shown = [tokenizer.decode(prompt) for prompt in prompts[:3]]
    end = "<|im_end|>\n<|im_start|>assistant\n"
    assert shown == [
        f"<|im_start|>user\nuser x{end}",
        f"<|im_start|>system\nsystem x<|im_end|>\n<|im_start|>user\nuser x{end}",
        "user",
    ]


def test_a_target_of_nan_is_not_measured():
    target, head = tiny.target(), tiny.head()
    params = jax.tree.map(lambda x: x * jnp.nan, target.params)
    broken = dataclasses.replace(target, params=params)
    with pytest.raises(InputError, match="every prompt must be answered; got the target computed"):
        acceptance(broken, head, [[1, 2, 3]], 2, 5)


def test_answers_end_where_those_of_users_do(monkeypatch):
    """At the target's end-of-sequence token, unless the run's `eval.ignore_eos` says otherwise."""
    prompts = [[3, 9, 4], [7, 1]]
    free = generate(tiny.target(), None, prompts, max_new_tokens=12)[0].output_token_ids
    place = next(i for i in range(2, 11) if free[i] not in free[:i])
    target, head = tiny.target(stop_ids=(free[place],)), tiny.head()
    document = Document("a", None, (), tuple(prompts[0]), (5,))
    lengths = {}
    decode = evaluate.generate

    def noting(*args, **options):
        answers = decode(*args, **options)
        lengths[ignore_eos] = len(answers[0].output_token_ids)
        return answers

    monkeypatch.setattr(evaluate, "generate", noting)
    tokenizer = text.train_tokenizer(["user x assistant"], 300)
    for ignore_eos in (False, True):
        options = {"num_prompts": 4, "max_new_tokens": 12, "ignore_eos": ignore_eos}
        run = build(Eagle3Run, {**RAW, "eval": options}, "test")
        measure = evaluate.make_evaluator(run, target, tokenizer, [document])
        assert measure is not None and measure(head)["acceptance_length"] >= 1
    assert lengths == {False: place + 1, True: 12}


def test_where_memory_is_short_fewer_prompts_are_decoded_at_a_time(monkeypatch, tmp_path):
    target, head = tiny.target(), tiny.head()
    prompts = [[1, 2, 3], [4], [5, 6], [7], [8]]
    want = acceptance(target, head, prompts, 2, 9)
    tried = []

    def short_of_memory(*args, max_batch, **options):
        tried.append(max_batch)
        if max_batch > most:
            raise LacksMemoryError("cache_size", "must fit the memory", "more", "lower max_batch")
        return generate(*args, max_batch=max_batch, **options)

    monkeypatch.setattr(evaluate, "generate", short_of_memory)
    most = 2
    assert acceptance(target, head, prompts, 2, 9) == want and tried == [5, 3, 2]
    most = 0
    with pytest.raises(InputError, match="eval: must fit the memory; got more; use shorter promp"):
        acceptance(target, head, prompts, 2, 9)
    # which ends no training
    run = build(
        Eagle3Run,
        RAW | {"eval": {"prompts": str(tmp_path / "p.jsonl"), "max_new_tokens": 9}},
        "test",
    )
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [1, 2]}')
    tokenizer = text.train_tokenizer(["user"], 300)
    evaluate_head = evaluate.make_evaluator(run, target, tokenizer, [])
    with pytest.warns(UserWarning, match="acceptance is not measured: eval: must fit the memory"):
        assert evaluate_head(head)["acceptance_length"] is None
