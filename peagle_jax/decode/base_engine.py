"""What all engines can do: take requests in, take steps, and answer any number of requests."""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from peagle_jax.decode.engine_stats import EngineStats
from peagle_jax.decode.requests import Generation, Output, Request, failed_answer
from peagle_jax.types import InputError, Model


class BaseEngine(abc.ABC):
    """Decodes requests, up to `max_batch` at a time.

    Attributes:
      max_batch: requests that are decoded together.
      max_steps: decoding steps before `step` returns; None: until a request is done, or, of engines
        side by side, after 64.
    """

    max_batch: int
    max_steps: int | None

    def __init__(self) -> None:
        # requests that `run` took and left, whose last outputs nobody wants
        self._left: set[int] = set()
        # outputs that no step has returned yet: a step that raises returns nothing
        self._kept: list[Output] = []

    @abc.abstractmethod
    def add(self, request: Request) -> int:
        """Takes a request in. It may be called from any thread, also while `step` runs.

        Returns:
          The request's number, which its outputs have.

        Raises:
          InputError: the target cannot serve it. Other requests are not touched.
        """

    @abc.abstractmethod
    def cancel(self, request_id: int) -> None:
        """Ends a request. One of the next `step` returns its answer so far.

        It may be called from any thread. A request that is done, or unknown, is left alone.
        """

    @abc.abstractmethod
    def check_memory(self, requests: Sequence[Request]) -> None:
        """Checks that requests can all be decoded at once.

        Raises:
          InputError: their caches would not fit the memory.
        """

    @property
    @abc.abstractmethod
    def models(self) -> tuple[Model, Any]:
        """The target and the drafter's parameters, as they are read in decoding: on a CPU maybe in
        another layout than they were loaded in. Of engines side by side, the first one's.
        """

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether a request has not had its last output."""

    @property
    @abc.abstractmethod
    def num_waiting(self) -> int:
        """Requests whose prompts nobody reads yet."""

    @property
    @abc.abstractmethod
    def num_running(self) -> int:
        """Requests that are being decoded."""

    @property
    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """What was done so far."""

    @abc.abstractmethod
    def step(self) -> list[Output]:
        """Reads a chunk of waiting prompts, and decodes until a request is done.

        Returns:
          What is new: answers that are done, and tokens of requests that stream.
        """

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Generation]]:
        """Answers any number of requests, each as soon as it is done.

        Requests are drawn as places become free, so that they need not fit the memory together. One
        that cannot be served is answered with the finish reason "error"; the others go on.

        Whoever stops listening, as by leaving a loop, cancels the requests that are under way.

        Yields:
          The request's place in `requests`, and its answer.

        What other requests say meanwhile, which `add` took, is kept for the next `step`.
        """
        coming = enumerate(requests)
        all_drawn = False
        places: dict[int, int] = {}
        of_others: list[Output] = []
        try:
            while not all_drawn or self.has_work:
                while not all_drawn and self.num_waiting < self.max_batch:
                    place, request = next(coming, (-1, None))
                    if request is None:
                        all_drawn = True
                        break
                    try:
                        places[self.add(request)] = place
                    except InputError as error:
                        yield place, failed_answer(request, str(error))
                for output in self.step():
                    number = output.request_id
                    if number not in places and number not in self._left:
                        of_others.append(output)
                    elif output.answer is not None and number in places:
                        yield places.pop(number), output.answer
                    elif output.answer is not None:
                        self._left.discard(number)
        finally:
            for number in places:
                self.cancel(number)
            self._left.update(places)
            self._kept += of_others
