"""An engine for asyncio: any number of tasks stream answers, and other threads decode them."""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from peagle_jax.decode.base_engine import BaseEngine
from peagle_jax.decode.engine import STEPS_PER_STOP_CHECK
from peagle_jax.decode.requests import Output, Request


class AsyncEngine:
    """Lets tasks share an engine.

        async with AsyncEngine(engine) as server:
            async for output in server.stream(Request(prompt=prompt, stream=True)):
                ...

    A task that stops listening, or fails while it does, cancels its own request alone.

    Args:
      engine: which nobody else may use meanwhile. Without `max_steps` it gets 8, so that requests
        that come in do not wait long.
    """

    def __init__(self, engine: BaseEngine) -> None:
        engine.max_steps = engine.max_steps or STEPS_PER_STOP_CHECK
        self._engine = engine
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "peagle-engine")
        self._news: dict[int, asyncio.Queue[Output | BaseException]] = {}
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None  # that ended the task

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._decode())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the step that is under way. Requests that are not done are given up."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._tell_everybody(RuntimeError("the engine was closed"))
        await asyncio.to_thread(self._thread.shutdown)  # a step may take long: others go on

    async def stream(self, request: Request) -> AsyncIterator[Output]:
        """The outputs of a request: for one that streams as tokens are written, else one.

        Raises:
          InputError: the target cannot serve the request.
          RuntimeError: the engine was closed, or failed.
        """
        if self._task is None or self._task.done():
            if (error := self._error) is not None:
                raise RuntimeError("the engine has failed: make a new one") from error
            raise RuntimeError("the engine is not running: use `async with AsyncEngine(...)`")
        number = self._engine.add(request)
        news = self._news[number] = asyncio.Queue()
        self._has_work.set()
        try:
            while True:
                output = await news.get()
                if isinstance(output, BaseException):
                    raise RuntimeError("the engine stopped before the answer was done") from output
                yield output
                if output.answer is not None:
                    return
        finally:
            # does nothing to a request that is done
            self._engine.cancel(number)
            del self._news[number]
            self._has_work.set()

    async def _decode(self) -> None:
        """Steps while there is work, each in the thread, and hands the outputs to their tasks."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                while self._engine.has_work:
                    outputs = await loop.run_in_executor(self._thread, self._engine.step)
                    for output in outputs:
                        if output.request_id in self._news:
                            self._news[output.request_id].put_nowait(output)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic of a library is no Exception
            self._error = error
            self._tell_everybody(error)
            raise

    def _tell_everybody(self, error: BaseException) -> None:
        for news in self._news.values():
            news.put_nowait(error)
