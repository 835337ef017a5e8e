"""The engine for asyncio: its tasks share one engine, and hear when it fails or is closed."""

import asyncio
import dataclasses

import pytest
from test_engine import make_engine, random_requests, small_sizes  # noqa: F401 (a fixture)

from peagle_jax.decode import loop
from peagle_jax.decode.requests import Request
from peagle_jax.decode.serving import AsyncEngine
from peagle_jax.types import InputError


def test_tasks_share_an_engine():
    requests = [dataclasses.replace(r, stream=True) for r in random_requests(9, seed=3)]
    want = dict(make_engine(3, max_batch=3).run(requests))

    async def listen(server, request):
        tokens = []
        async for output in server.stream(request):
            tokens += output.new_token_ids
            answer = output.answer
        assert tokens == answer.output_token_ids
        return answer

    async def breaks(server, request):
        async for _ in server.stream(request):
            raise KeyError("the consumer's own mistake")

    async def leaves(server, request):
        stream = server.stream(request)
        await anext(stream)
        await stream.aclose()

    async def main():
        server = make_engine(3, max_batch=3)
        async with AsyncEngine(server) as asynchronous:
            results = await asyncio.gather(
                *(listen(asynchronous, request) for request in requests),
                breaks(asynchronous, Request(prompt=[3], max_new_tokens=200, stream=True)),
                leaves(asynchronous, Request(prompt=[4], max_new_tokens=200, stream=True)),
                listen(asynchronous, Request(prompt=[], max_new_tokens=200)),
                return_exceptions=True,
            )
            # a request that comes when all others are done
            again = await listen(asynchronous, requests[2])
        assert not server.has_work
        return results, again

    results, again = asyncio.run(main())
    assert results[:9] == [want[i] for i in range(9)] and again == want[2]
    assert isinstance(results[9], KeyError) and results[10] is None
    assert isinstance(results[11], InputError)


def test_an_engine_that_fails_tells_its_listeners(monkeypatch):
    def fail(*arguments):
        raise ArithmeticError("a bug")

    async def main():
        async with AsyncEngine(make_engine(3)) as server:
            monkeypatch.setattr(loop, "decode", fail)
            with pytest.raises(RuntimeError, match="stopped before") as error:
                async for _ in server.stream(Request(prompt=[3])):
                    pass
            assert isinstance(error.value.__cause__, ArithmeticError)
            with pytest.raises(RuntimeError, match="has failed: make a new one") as error:
                await anext(server.stream(Request(prompt=[3])))
            assert isinstance(error.value.__cause__, ArithmeticError)
        with pytest.raises(RuntimeError, match="is not running"):
            await anext(AsyncEngine(make_engine(3)).stream(Request(prompt=[3])))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_closed_engine_tells_its_listeners():
    async def main():
        async with AsyncEngine(make_engine(3)) as server:
            stream = server.stream(Request(prompt=[3], max_new_tokens=500, stream=True))
            await anext(stream)
        with pytest.raises(RuntimeError, match="stopped before"):
            async for _ in stream:
                pass

    asyncio.run(asyncio.wait_for(main(), 60))
