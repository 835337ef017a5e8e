"""What a server answers is bounded. Its other answers: bench/test_served_model.py."""

import json

import pytest

from peagle_jax import openai_server
from peagle_jax.openai_server import OpenAIServer
from peagle_jax.types import InputError
from tests.http_server import Handler, serving


class Server(Handler):
    """One model, whose answers are one long line."""

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "m", "owned_by": "x" * self.server.length}]}))

    def do_POST(self):
        self.answer("data: " + "y" * self.server.length)


def test_an_answer_that_does_not_end(monkeypatch):
    monkeypatch.setattr(openai_server, "MAX_BYTES", 90)
    with serving(Server, length=10) as server:
        client = OpenAIServer(server.url, None, "look at its log")
        server.length = 200
        with pytest.raises(InputError, match="/v1/models: .* more than 90 bytes; look at its log"):
            OpenAIServer(server.url, None, "look at its log")
        with pytest.raises(InputError, match="a line of more than 90 bytes"):
            list(client.stream("/completions", {"model": "m"}))
        assert client.find("/metrics") is None
        server.length = 10
        assert "xxx" in client.find("/metrics")
