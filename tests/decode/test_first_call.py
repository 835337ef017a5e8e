"""One thread compiles at a time, and there is room for what it compiles."""

import itertools
import threading
import time

import jax
import pytest
import tiny

from peagle_jax import free_memory
from peagle_jax.decode import first_call, growth
from peagle_jax.decode.generate import make_drafter
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.decode.requests import Request


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Programs of other tests, and what they have mapped, do not count."""
    monkeypatch.setattr(first_call, "_mappings_of_others", 0)
    first_call._called.clear()
    yield
    first_call._called.clear()  # what is let go of here is known to no later test


def test_a_program_is_compiled_by_one_thread():
    """Others that need it wait; those whose programs are there do not."""
    order = []
    entered, go_on = threading.Event(), threading.Event()

    def compile_slowly():
        with first_call.first_call("test", "slow"):
            entered.set()
            go_on.wait(60)
            time.sleep(0.05)
            order.append("slow")

    with first_call.first_call("test", "known"):
        pass
    slow = threading.Thread(target=compile_slowly)
    slow.start()
    entered.wait(60)
    with first_call.first_call("test", "known"):
        order.append("known")
    go_on.set()
    with first_call.first_call("test", "slow"):
        order.append("slow again")
    slow.join()
    assert order == ["known", "slow", "slow again"]


class Mappings:
    """Stands in for the memory mappings of this process."""

    def __init__(self, monkeypatch):
        self.number, self.num_cleared, self.left = 0, 0, 10
        monkeypatch.setattr(first_call, "num_mappings", lambda: self.number)
        monkeypatch.setattr(first_call, "most_mappings", lambda: 1000)
        monkeypatch.setattr(jax, "clear_caches", self.clear)

    def clear(self):
        self.num_cleared, self.number = self.num_cleared + 1, self.left


def call(name):
    """Whether a call compiles its program."""
    was_called = first_call.was_called("test", name)
    with first_call.first_call("test", name):
        pass
    return not was_called


def test_programs_are_let_go_of_before_mappings_are_used_up(monkeypatch):
    mappings = Mappings(monkeypatch)
    mappings.number = 700
    assert call("one") and call("two") and not call("one") and not mappings.num_cleared
    mappings.number = 701
    assert not call("one") and not mappings.num_cleared  # nothing is compiled
    assert call("three") and mappings.num_cleared == 1
    # the program that was compiled after that is known, and those before it are not
    assert not call("three") and call("one") and call("two") and mappings.num_cleared == 1


def test_programs_stay_where_others_use_up_the_mappings(monkeypatch):
    """Without them there would be no more room; and all would be compiled again and again."""
    mappings = Mappings(monkeypatch)
    mappings.number, mappings.left = 950, 900
    assert call("one") and mappings.num_cleared == 1
    mappings.number = 970  # 7 in 10 of those that are left
    assert call("two") and not call("one") and mappings.num_cleared == 1
    mappings.number = 971
    assert call("three") and mappings.num_cleared == 2


def test_a_program_that_another_thread_lets_go_of():
    """After it was found, and before it was called: that it is compiled then, nobody is told."""
    assert call("one") and not call("one")
    with first_call.first_call("test", "one"):
        other = threading.Thread(target=first_call.let_go)
        other.start()
        other.join()
    assert call("one")


def test_what_fails_is_not_known():
    with pytest.raises(ZeroDivisionError), first_call.first_call("test", "fails"):
        raise ZeroDivisionError
    assert call("fails")


def test_linux_says_what_is_mapped(monkeypatch, tmp_path):
    before = free_memory.num_mappings()
    assert before > 100 and free_memory.most_mappings() > before
    # another system says nothing
    monkeypatch.setattr(free_memory, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(free_memory, "MOST_MAPS", tmp_path / "max_map_count")
    assert (free_memory.num_mappings(), free_memory.most_mappings()) == (0, 65_530)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_answers_stay_when_programs_are_let_go_of(num_threads, monkeypatch):
    """All of them, before each compilation, and while another thread runs one."""
    target, head = tiny.pair("peagle", context=640)
    requests = [
        Request(prompt=[5 + i] * (3 + 7 * i), max_new_tokens=7 * i + 5, stop_ids=(), **options)
        for i, options in enumerate(
            ({}, {"temperature": 0.8, "seed": 3}, {}, {"logprobs": True}, {"min_p": 0.1}, {})
        )
    ]

    def answers():
        drafter = make_drafter(head, 3, "peagle")
        options = {"max_batch": 3, "num_threads": num_threads}
        engine = make_engine(target, drafter, head.params, **options)
        return {i: answer.output_token_ids for i, answer in engine.run(requests)}

    wanted, num_freed, clear = answers(), [], jax.clear_caches

    def counting():
        before = free_memory.num_mappings()
        clear()
        num_freed.append(before - free_memory.num_mappings())

    monkeypatch.setattr(jax, "clear_caches", counting)
    monkeypatch.setattr(first_call, "USED_PART", 0.0)
    first_call._called.clear()
    assert answers() == wanted and len(num_freed) > 2
    assert max(num_freed) > 100 and sum(num_freed) > 50 * len(num_freed)


def test_steps_that_would_compile_are_known(tmp_path):
    """Those with another K, and after programs were let go of. An adaptive K asks before it
    measures."""
    target, head = tiny.pair("peagle", context=640)
    options = {"step_times": tmp_path, "max_batch": 2, "max_steps": 4, "num_threads": 1}
    engine = make_engine(target, make_drafter(head, 3, "peagle"), head.params, **options)
    first_call._called.clear()
    engine.add(Request(prompt=[4] * 9, max_new_tokens=150, stop_ids=()))
    engine.step()
    assert engine._batch.has_compiled_steps(3) and not engine._batch.has_compiled_steps(2)
    first_call.let_go()
    assert not engine._batch.has_compiled_steps(3)


def test_every_program_of_an_engine_has_a_name(monkeypatch, tmp_path):
    """Of its own: one with more places for stop ids is another."""
    monkeypatch.setattr(growth, "FIRST_SLOTS", 64)
    target, head = tiny.pair("peagle", context=640)
    options = {"adaptive_k": True, "step_times": tmp_path, "num_threads": 1, "max_batch": 2}
    drafter = make_drafter(head, 2, "peagle")
    engine = make_engine(target, drafter, head.params, max_steps=4, **options)
    ks = itertools.cycle([2] * 3 + [0] * 3)

    def another_is_best(candidates, *_):
        best = next(ks)
        return {k: 0.01 if k == best else 1.0 for k in candidates}

    monkeypatch.setattr(engine._step_times, "get", another_is_best)

    ((_, answer),) = engine.run([Request(prompt=[4] * 9, max_new_tokens=90, stop_ids=())])
    never_said = sorted(set(range(41)) - set(answer.output_token_ids))
    first_call._called.clear()

    def new_names(num_stop_ids):
        before = set(first_call._called)
        # the second enters while the first is decoded, and the caches grow
        for new in (90, 20, 30):
            stop_ids = never_said[:num_stop_ids]
            engine.add(Request(prompt=[4] * 9, max_new_tokens=new, stop_ids=stop_ids))
        while engine.has_work:
            engine.step()
        return [name for name in first_call._called if name not in before]

    def kinds(num_stop_ids):
        # the name of a decoding program begins with its spec
        names = new_names(num_stop_ids)
        return {name[0] if isinstance(name[0], str) else "decode" for name in names}

    # the prompts are one: it is read once, and repeated for its answers
    reading = {"empty", "read_chunk", "first_tokens", "repeat", "begin"}
    assert kinds(1) == {*reading, "decode", "put_row", "resize", "change_k"}
    # neither reading nor first tokens know of stop ids
    assert kinds(5) == {"begin", "decode"}
