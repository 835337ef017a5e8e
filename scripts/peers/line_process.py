"""The side that asks: it starts a worker of line_worker.py, and reads an answer for each line."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle_jax.types import InputError


class LineProcess:
    """A worker in a process of its own, ready to answer.

    Args:
      name: of the worker, in errors.
      command: what starts it.
      job: its first line.
      rule: what it must do, in errors.
      next_step: for whom it ends without doing so.
      verbose: what it prints is shown.
      environment: variables beside this process's.

    Attributes:
      version: of the package that it measures.

    Raises:
      InputError: it ended before it was ready, or says an error.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        job: dict,
        *,
        rule: str,
        next_step: str,
        verbose: bool,
        environment: Mapping[str, str] | None = None,
    ):
        self._name, self._rule, self._next_step = name, rule, next_step
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            self.version = self.ask(job)["version"]
        except InputError:
            self.close()
            raise

    def ask(self, request: dict) -> dict:
        """The answer to a request, with "seconds".

        Raises:
          InputError: the worker ended, or says an error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "it ended without an answer"}
        if "error" in answer:
            raise InputError(self._name, self._rule, answer["error"], self._next_step)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
