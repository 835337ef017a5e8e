"""A client of servers with OpenAI's API, such as vLLM's: their models, and answers to requests.

`peagle regenerate --server` lets such a server write, and `peagle bench --server` measures it.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from peagle_jax.types import InputError

TIMEOUT = 3600.0  # seconds that a server may take for an answer
MAX_BYTES = 1 << 28  # of an answer; a million tokens with log-probabilities are less
REFUSED = {400, 413, 422}  # of HTTP: the request cannot be answered as it is
BUSY = {429, 502, 503, 504}  # of HTTP: the same request may be answered later
WAITS = (1.0, 4.0, 16.0, 60.0)  # seconds before a busy server is asked again
KEY_VARIABLE = "OPENAI_API_KEY"  # of the environment, as OpenAI's own client reads it
MAX_CHARS = 200  # of a server's own words about an error
DATA = b"data:"  # what a line of a stream of events begins with
END = b"[DONE]"


class RefusedError(InputError):
    """A server's answer that a request is wrong, as one that is too long (HTTP 400, 413, 422)."""


class OpenAIServer:
    """A server, and one of its models.

    Args:
      url: of the server, with or without its /v1.
      model: its name there; None for the first that the server lists.
      next_step: what to do where the server does not answer.

    Attributes:
      root: the URL without /v1.
      model: the name that requests have.

    Raises:
      InputError: the server does not answer, or does not list the model.
    """

    def __init__(self, url: str, model: str | None, next_step: str) -> None:
        self.root, self._next_step = url.rstrip("/").removesuffix("/v1"), next_step
        if not self.root.startswith(("http://", "https://")):
            next_step = "write it as http://localhost:8000"
            raise InputError("--server", "must be the URL of a server", url, next_step)
        listed = item(self.ask("/models"), "data")
        names = [str(item(one, "id")) for one in listed] if isinstance(listed, list) else []
        if model is not None and model not in names:
            rule = f"the server lists {', '.join(names) or 'no model'}"
            raise InputError("--server-model", rule, model, "give one of these names")
        self.model = model or str(item(listed, 0, "id"))
        self._owner = str(next(iter(listed), {}).get("owned_by") or "server")

    def ask(self, path: str, body: Mapping | None = None, where: str = "") -> dict[str, Any]:
        """The answer to a request, which is JSON. Where a server is busy, it is asked again.

        Args:
          path: below /v1.
          body: of a POST; None for a GET.
          where: what is asked, for errors.

        Raises:
          RefusedError: the server says that this request is wrong.
          InputError: it refuses for another reason, or does not answer with a JSON object.
        """
        try:
            with self._open_when_free(path, body) as response:
                answer = json.loads(_whole(response))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise self._refusal(path, where, error) from None
        if not isinstance(answer, dict):
            raise self._refusal(path, where, ValueError(f"no object: {answer}"))
        return answer

    def stream(
        self, path: str, body: Mapping, where: str = ""
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """The pieces of an answer as they come, with the time at which each was read.

        Times are of `time.perf_counter`. The last piece has the answer's `usage`.

        Raises:
          InputError: the server refuses, or the stream ends before its end mark.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._open(path, body) as response:
                while line := response.readline(MAX_BYTES + 1):
                    now = time.perf_counter()
                    if len(line) > MAX_BYTES:
                        raise ValueError(f"a line of more than {MAX_BYTES:,} bytes")
                    data = line.removeprefix(DATA).strip()
                    if not line.startswith(DATA):
                        continue
                    if data == END:
                        return
                    piece = json.loads(data)
                    if not isinstance(piece, dict) or "error" in piece:
                        raise ValueError(_one_line(data))
                    yield now, piece
            raise ValueError("an answer that breaks off")
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise self._refusal(path, where, error) from None

    def engine(self) -> str:
        """What serves, and its version where it says that at /version, as vLLM does."""
        try:
            version = json.loads(self.find("/version") or "{}").get("version")
        except (AttributeError, ValueError, RecursionError):
            version = None
        return f"{self._owner} {version}" if version else self._owner

    def find(self, path: str) -> str | None:
        """The text at a path below the root, as /metrics; None where the server has none."""
        try:
            with urllib.request.urlopen(self.root + path, timeout=TIMEOUT) as response:
                return _whole(response).decode(errors="replace")
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def _open_when_free(self, path: str, body: Mapping | None) -> Any:
        """As `_open`, again after a while where the server is busy or has lost the connection."""
        for seconds in WAITS:
            try:
                return self._open(path, body)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY:
                    raise
                error.close()
            except (ConnectionResetError, http.client.RemoteDisconnected):
                pass
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionResetError):
                    raise
            time.sleep(seconds)
        return self._open(path, body)

    def _open(self, path: str, body: Mapping | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            if not (key.isascii() and key.isprintable()):  # http.client's error would show the key
                rule, next_step = "must be one line of ASCII", "set it again, or unset it"
                raise InputError(KEY_VARIABLE, rule, "other characters", next_step)
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.root}/v1{path}", data, headers)
        return urllib.request.urlopen(request, timeout=TIMEOUT)

    def _refusal(self, path: str, where: str, error: Exception) -> InputError:
        got = str(getattr(error, "reason", None) or error or type(error).__name__)
        kind = InputError
        if isinstance(error, urllib.error.HTTPError):
            got = f"{error.code}: {_one_line(error.read(10 * MAX_CHARS))}"
            kind = RefusedError if error.code in REFUSED else InputError
        place = f"{self.root}/v1{path}" + (f", {where}" if where else "")
        return kind(place, "the server must answer", got, self._next_step)


def _whole(response: Any) -> bytes:
    """All that a server answers; ValueError where that is more than any answer takes."""
    content = response.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes")
    return content


def _one_line(data: bytes) -> str:
    return " ".join(data.decode(errors="replace").split())[:MAX_CHARS]


def item(value: Any, *path: str | int) -> Any:
    """An item within JSON that a server sent.

    Raises:
      InputError: there is none.
    """
    for key in path:
        try:
            value = value[key]
        except (TypeError, KeyError, IndexError):
            rule = f"the server's answer must have {'.'.join(map(str, path))}"
            next_step = "use a server with OpenAI's completions and chat completions"
            raise InputError("--server", rule, json.dumps(value)[:60], next_step) from None
    return value
