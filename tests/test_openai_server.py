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


class BusyServer(Handler):
    """Answers with the statuses that are left, and then with its model; keeps the headers."""

    def do_GET(self):
        self.server.headers_seen.append(dict(self.headers))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status is None:  # the connection is lost
            self.close_connection = True
            self.connection.close()
        elif status == 200:
            self.answer(json.dumps({"data": [{"id": "m"}]}))
        else:
            self.answer("not now", status)


def test_a_busy_server_is_asked_again(monkeypatch):
    monkeypatch.setattr(openai_server, "WAITS", (0.0, 0.0, 0.0, 0.0))
    with serving(BusyServer, statuses=[429, 503, None, 502], headers_seen=[]) as server:
        assert OpenAIServer(server.url, None, "look at its log").model == "m"
        assert len(server.headers_seen) == 5
        server.statuses = [503] * 5
        with pytest.raises(InputError, match="must answer; got 503: not now; look at its log"):
            OpenAIServer(server.url, None, "look at its log")
        assert not server.statuses
        for status in (400, 401, 500):
            server.statuses, server.headers_seen = [status], []
            with pytest.raises(InputError, match=f"got {status}: not now"):
                OpenAIServer(server.url, None, "look at its log")
            assert len(server.headers_seen) == 1


def test_the_key_of_the_environment_is_sent(monkeypatch):
    with serving(BusyServer, statuses=[], headers_seen=[]) as server:
        for key, want in ((None, None), ("", None), ("secret", "Bearer secret")):
            monkeypatch.delenv("OPENAI_API_KEY", raising=False)
            if key is not None:
                monkeypatch.setenv("OPENAI_API_KEY", key)
            OpenAIServer(server.url, None, "look at its log")
            assert server.headers_seen[-1].get("Authorization") == want
        monkeypatch.setenv("OPENAI_API_KEY", "secret\r\n")
        OpenAIServer(server.url, None, "look at its log")
        assert server.headers_seen[-1]["Authorization"] == "Bearer secret"
        monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
        with pytest.raises(InputError) as caught:
            OpenAIServer(server.url, None, "look at its log")
        assert "OPENAI_API_KEY: must be one line of ASCII" in str(caught.value)
        assert "ret" not in str(caught.value).replace("secret", "").split("got")[1]
