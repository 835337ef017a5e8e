"""Chat templates, rendered so that it is known where every message ends up.

Templates drop, trim and move text, and what they make of the first turns of a conversation need not
be the beginning of what they make of all of it (Qwen3 drops the reasoning of earlier turns). So the
template itself says where things are: characters that occur nowhere else are written into messages,
and by the loops of the template, and are taken out of its output again.
"""

import contextlib
import dataclasses
import functools
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from transformers.utils import chat_template_utils

from peagle_jax.free_memory import data_bytes
from peagle_jax.types import InputError

# Marks are characters of this plane that the text does not have. Unicode gives them no meaning.
FIRST_MARK, LAST_MARK = 0x100000, 0x10FFFD
ANY_MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
# What loops and generation blocks call. No template has a variable of this name.
MARK = "peagle_jax_mark"
# For all renderings of a conversation. The longest take milliseconds; a template can loop for days.
RENDER_SECONDS = 30.0
# Bytes that they may allocate. The longest take megabytes; a template can multiply a text by
# anything.
RENDER_BYTES = 2**31
# Of a rendered conversation, which is then tokenized in time and memory that nothing else bounds.
# Some four million tokens, and so more than the context of any target.
MOST_CHARACTERS = 2**24


class TooManyMarksError(ValueError):
    """A conversation with more messages than there are marks for."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in the output of a template.

    Attributes:
      kind: "message" around what a loop makes of a message; "generation" around what the template
        itself marks as generated; or any other word, of marks that were written into messages.
      key: which one: the number of a message, or what `Marks.new` was told.
      is_end: whether it is the end.
      loop: number of the loop, of the kind "message".
    """

    kind: str
    key: Any
    is_end: bool
    loop: int = 0


class Marks:
    """Gives out marks.

    Args:
      taken: text whose characters must not be marks.
    """

    def __init__(self, taken: str) -> None:
        self._taken = set(ANY_MARK.findall(taken))
        self._next = FIRST_MARK
        self.by_character: dict[str, Mark] = {}

    def new(self, mark: Mark) -> str:
        """The character of a new mark."""
        while chr(self._next) in self._taken:
            self._next += 1
        if self._next > LAST_MARK:
            raise TooManyMarksError
        character = chr(self._next)
        self._next += 1
        self.by_character[character] = mark
        return character

    def take_out(self, text: str) -> tuple[str, list[tuple[int, Mark]]]:
        """The text without marks; and the place in it of each mark, in order."""
        parts, found, start, length = [], [], 0, 0
        for match in ANY_MARK.finditer(text):
            mark = self.by_character.get(match.group())
            if mark is not None:
                parts.append(text[start : match.start()])
                length += match.start() - start
                start = match.end()
                found.append((length, mark))
        parts.append(text[start:])
        return "".join(parts), found


def _call_mark(kind: str, is_end: bool, loop: int, names: Sequence[str] = ()) -> nodes.Output:
    """Output of a call of the function MARK, with variables of the template."""
    constants = [nodes.Const(kind), nodes.Const(is_end), nodes.Const(loop)]
    variables = [nodes.Name(name, "load") for name in names]
    call = nodes.Call(nodes.Name(MARK, "load"), [*constants, *variables], [], None, None)
    return nodes.Output([call])


class MarkedTemplate:
    """A chat template whose loops over messages mark what they write.

    Args:
      source: the template.

    Raises:
      TemplateError: it is not a Jinja template.
    """

    def __init__(self, source: str) -> None:
        # the environment that transformers renders this template in, with its sandbox, filters and
        # `{% generation %}`, which is a call block
        environment = chat_template_utils._compile_jinja_template(source).environment
        tree = environment.parse(source)
        self.source = source
        self.has_generations = False
        for block in tree.find_all(nodes.CallBlock):
            if isinstance(block.call.node, nodes.ExtensionAttribute):
                self.has_generations = True
                begin, end = (_call_mark("generation", is_end, 0) for is_end in (False, True))
                block.body = [begin, *block.body, end]
        for number, loop in enumerate(tree.find_all(nodes.For)):
            names = [name.name for name in loop.target.find_all(nodes.Name)]
            if isinstance(loop.target, nodes.Name):
                names = [loop.target.name]
            begin, end = (_call_mark("message", is_end, number, names) for is_end in (False, True))
            loop.body = [begin, *loop.body, end]
        nodes.Node.set_environment(tree, environment)
        for node in tree.find_all(nodes.Node):
            if node.lineno is None:
                node.lineno = 1
        self._template = environment.from_string(tree)

    def render(
        self, messages: Sequence[Mapping], marks: Marks, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, Mark]]]:
        """What the template makes of messages, as `Marks.take_out` gives it.

        Args:
          messages: each a dict of its own.
          marks: of this text; marks in the messages are of these, too.
          variables: what the template can read beside the messages.

        Raises:
          Exception: whatever the template raises.
        """
        numbers = {id(message): i for i, message in enumerate(messages)}

        def mark(kind: str, is_end: bool, loop: int, *items: Any) -> str:
            if kind == "generation":
                return marks.new(Mark(kind, None, is_end))
            for item in items:
                if id(item) in numbers:
                    return marks.new(Mark(kind, numbers[id(item)], is_end, loop))
            return ""

        text = self._template.render(messages=messages, **{**variables, MARK: mark})
        return marks.take_out(text)


class _TimeIsUp(BaseException):
    """No Exception, because what templates raise is caught where one rendering is given up."""


@contextlib.contextmanager
def limited(where: str) -> Iterator[None]:
    """Ends what takes longer than RENDER_SECONDS, or more memory than RENDER_BYTES: renderings of
    one conversation.

    A signal ends what takes long, and so only in the main thread, where Python handles signals,
    and only where nobody else has set its timer, as in a context within this one. Memory is limited
    there alone, too, and on Linux: the limit is the whole process's, so that what other threads
    allocate meanwhile counts as well.

    Raises:
      InputError: the time is up, or memory is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    has_timer = is_main and hasattr(signal, "setitimer")
    must, next_step = "the chat template must render a conversation", "leave the conversation out"
    try:
        if has_timer and not any(signal.getitimer(signal.ITIMER_REAL)):
            with _limited_memory(), _limited_time():
                yield
        else:
            yield
    except _TimeIsUp:
        rule = f"{must} within {RENDER_SECONDS:g} seconds"
        next_step += ", or correct the loops of the template"
        raise InputError(where, rule, "more", next_step) from None
    except MemoryError:
        rule = f"{must} in free memory, within {RENDER_BYTES / 2**30:g} GiB"
        next_step += ", or correct what the template repeats"
        raise InputError(where, rule, "more", next_step) from None


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raises _TimeIsUp after RENDER_SECONDS."""
    is_over = False

    def end(*_: object) -> None:
        if not is_over:
            raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    # again each second, as an exception within a destructor is lost
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS, 1.0)
    try:
        yield
    finally:
        try:
            is_over = True  # where the signal comes at this moment, the rest is done all the same
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Lets the process allocate RENDER_BYTES more than it has, where Linux says what it has."""
    data = data_bytes()
    if data is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([data + RENDER_BYTES, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def one_line(error: Exception) -> str:
    """An exception in a few words."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__


@functools.lru_cache(maxsize=16)
def marked_template(source: str) -> MarkedTemplate:
    """The `MarkedTemplate` of a chat template."""
    return MarkedTemplate(source)


def blocks_of_messages(places: Sequence[tuple[int, Mark]]) -> dict[int, list[tuple[int, int]]]:
    """What the loops of a template wrote for each message: (start, end), none of them empty.

    A loop that goes on to its next message in the middle of its body has no end for the former.
    """
    blocks: dict[int, list[tuple[int, int]]] = {}
    open_messages: dict[int, tuple[int, int]] = {}  # by loop: the message, and where it begins
    for place, mark in places:
        if mark.kind != "message":
            continue
        message, start = open_messages.pop(mark.loop, (None, 0))
        if message is not None and place > start:
            blocks.setdefault(message, []).append((start, place))
        if not mark.is_end:
            open_messages[mark.loop] = mark.key, place
    return blocks


def generations(places: Sequence[tuple[int, Mark]]) -> Iterator[tuple[int, int]]:
    """(start, end) of what the template itself marks as generated."""
    start = 0
    for place, mark in places:
        if mark.kind == "generation":
            if mark.is_end and place > start:
                yield start, place
            start = place
