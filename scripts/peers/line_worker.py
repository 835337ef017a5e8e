"""A process that answers requests one line at a time.

compare_speed.py and compare_training.py ask, by line_process.py; engines and trainers answer. Each
of them runs in an environment of its own, so this file imports nothing outside of Python.
"""

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable


def serve(start: Callable[[dict], Callable[[dict], dict]], package: str) -> None:
    """Answers requests from stdin until it is closed.

    The first line is the job, which `start` gets. It returns a function from a request to an
    answer; of an engine {"prompts", "max_new_tokens", "batch_size"} -> {"outputs", ..}. "seconds"
    are added here, unless the answer has its own. An exception becomes {"error": message}, and ends
    the process. The answer to the job itself is {"version"} of `package`.

    What libraries print goes to stderr: stdout has answers only.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        answer_to = start(json.loads(sys.stdin.readline()))
        say({"version": version(package)})
        for line in sys.stdin:
            began = time.perf_counter()
            answer = answer_to(json.loads(line))
            say({"seconds": time.perf_counter() - began} | answer)
    except Exception as error:  # whatever an engine raises is its answer
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})


def version(package: str) -> str:
    """Of an installed package; a checkout that is only on the path has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def batches(request: dict) -> list[list[list[int]]]:
    """The prompts of a request in batches of its size; the last may be smaller.

    All are together where an engine is to decode so many at a time, and to begin the next one
    wherever one is done.
    """
    prompts, size = request["prompts"], request["batch_size"]
    if request["continuous"]:
        return [prompts]
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]
