"""For fuzz tests: how many cases they try, JSON and bytes with anything anywhere, what may happen.

A fuzz test makes inputs at random and asks that whatever reads them succeeds or raises InputError.
In `make test` each tries 20 to 500 cases, the same in every run. `make fuzz` sets
PEAGLE_FUZZ_CASES, and they try as many, others in every run.
"""

import atexit
import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from peagle_jax.types import InputError

CASES = os.environ.get("PEAGLE_FUZZ_CASES")
# What may stand in the bytes of JSON: too deep, too large, no JSON, no UTF-8.
JSON_PIECES = (b"[" * 3000, b'{"a":' * 3000, b"1" * 5000, b"1e999", b"NaN", b"\xff", b"null")
# Values that readers of JSON may not expect: numbers of any size, texts, lists and objects.
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 50),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 50) | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


tried = 0  # inputs, by all fuzz tests of this process


def cases(usual: int, parts: int = 1) -> Callable[[Callable], Callable]:
    """Settings of a fuzz test that tries so many cases, or as many as PEAGLE_FUZZ_CASES says.

    Args:
      usual: cases in `make test`.
      parts: of the input there are so many kinds, with a test each, which share the latter number.
    """
    limits = settings(
        max_examples=usual if CASES is None else -(-int(CASES) // parts),
        derandomize=CASES is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    def limited(test: Callable) -> Callable:
        inner = test.hypothesis.inner_test

        @functools.wraps(inner)
        def counted(*args: object, **inputs: object) -> None:
            global tried
            tried += 1
            inner(*args, **inputs)

        test.hypothesis.inner_test = counted
        return limits(test)

    return limited


@atexit.register
def say_how_many() -> None:
    """For scripts/measure/fuzz.py."""
    if CASES is not None:
        print(f"tried {tried} inputs", flush=True)


@contextlib.contextmanager
def only_input_errors(most: int = 2000) -> Iterator[None]:
    """Lets an InputError of one readable line of fewer characters pass, and nothing else."""
    try:
        yield
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < most, error


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The keys that lead to every value within JSON, itself included."""
    yield path
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = list(enumerate(value)) if isinstance(value, list) else []
    for key, one in inner:
        yield from places(one, (*path, key))


@st.composite
def changed(draw, raw: dict, more_keys: tuple[str, ...] = (), others=values) -> dict:
    """A copy of JSON with one or two values replaced, removed or added.

    Args:
      raw: an object.
      more_keys: that it may get.
      others: what the new values are.
    """
    raw = copy.deepcopy(raw)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([p for p in places(raw) if p] + [(key,) for key in more_keys]))
        node = raw
        for key in path[:-1]:
            node = node[key]
        if draw(st.booleans()) or not isinstance(node, dict):
            # a copy: what is drawn twice may be changed within itself otherwise
            node[path[-1]] = copy.deepcopy(draw(others))
        else:
            node.pop(path[-1], None)
    return raw


@st.composite
def damaged(draw, content: bytes, pieces: tuple[bytes, ...] = ()) -> bytes:
    """Bytes of which up to three places were cut, overwritten or filled with something.

    Args:
      content: what is damaged.
      pieces: that may come into it, beside any bytes.
    """
    inserted = st.binary(max_size=3)
    if pieces:
        inserted = st.sampled_from(pieces) | inserted
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(content)))
        gap = draw(st.sampled_from([0, 0, 1, 7, len(content)]))
        content = content[:at] + draw(inserted) + content[at + gap :]
    return content
