"""Nothing asks the network unless a name or an option of the user's does."""

import os
import subprocess
import sys

import pytest

from peagle_jax.pipelines.demo import ASSETS

# a hook of Python's own, which no library can go around without C
WITHOUT = """
import sys
ASKED = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
def watch(event, arguments):
    if event in ASKED:
        print("NETWORK:", event, arguments, file=sys.stderr, flush=True)
        raise OSError("no network here")
sys.addaudithook(watch)
from peagle_jax.cli import main
code = main(sys.argv[1:])
sys.stderr.flush()
sys.exit(code)
"""
TARGET, HEAD = str(ASSETS / "target"), str(ASSETS / "peagle")
GENERATE = ["generate", "--target", TARGET, "--drafter", HEAD, "-k", "3", "--max-new-tokens", "4"]
COMMANDS = {
    "generate": [*GENERATE, "--prompt", "def f(x):"],
    "inspect": ["inspect", HEAD],
    "convert": ["convert", HEAD, "OUT", "--to", "speculators", "--target", TARGET],
    "extract": ["extract", "--target", TARGET, "--data", "DATA", "--out", "OUT", "--seq-len", "9"],
}


def run(words, tmp_path):
    """The process, with what a user has: no variable that switches a library's network off."""
    (tmp_path / "rows.jsonl").write_text('{"text": "def f(x):\\n    return x\\n"}\n' * 9)
    places = {"OUT": str(tmp_path / "out"), "DATA": str(tmp_path / "rows.jsonl")}
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    environment = {key: value for key, value in os.environ.items() if key not in offline}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *(places.get(word, word) for word in words)],
        env=environment | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_ETAG_TIMEOUT": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_local_folders_ask_no_network(words, tmp_path):
    done = run(words, tmp_path)
    assert done.returncode == 0 and "NETWORK" not in done.stderr, done.stderr[-2000:]


def test_a_hub_id_would_be_noticed(tmp_path):
    """The hook sees what the libraries do."""
    done = run(["inspect", "someone/nothing-of-that-name"], tmp_path)
    assert done.returncode == 2 and "NETWORK: socket." in done.stderr, done.stderr
