"""Commands whose target is spread over four simulated devices do what they do on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from features import close, options, write_corpus, write_target

from peagle_jax.checkpoints.head_writing import save_drafter
from peagle_jax.cli import main
from peagle_jax.pipelines.extract import extract_hidden_states
from peagle_jax.targets.sharding import parallel_mesh
from peagle_jax.train.hidden_state_store import open_hidden_states
from peagle_jax.types import InputError

PROGRAM = Path(__file__).with_name("several_devices.py")
FOUR = "--tensor-parallel-size 4"
GROUPS = "--data-parallel-size 2 --tensor-parallel-size 2"


def commands(place, out, spread: dict[str, str]) -> list[list[str]]:
    """What is run on one device and on four, with other options for the latter."""
    target, prompts = f"--target {place}/target", f"{place}/prompts.jsonl"
    lines = {
        "extract": f"extract {target} --data {place}/corpus.jsonl --aux-hidden-state-layers 1,3 "
        f"--seq-len 12 --batch-size 4 --dtype float32 --out {out}/states",
        "regenerate": f"regenerate {target} --data {prompts} --max-new-tokens 9 --temperature 0 "
        f"--batch-size 2 --out {out}/answers.jsonl",
        "generate": f"generate {target} --drafter {place}/head -k 3 --prompts {prompts} "
        f"--max-new-tokens 12 --out {out}/rows.jsonl",
    }
    return [f"{line} {spread.get(name, '')}".split() for name, line in lines.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("devices")
    write_corpus(folder / "corpus.jsonl")
    write_target(folder / "target", tokenizer, seed=3, heads=8, kv_heads=4)
    save_drafter(tiny.head(vocab=len(tokenizer), draft_vocab=len(tokenizer)), folder / "head")
    rows = [{"prompt": "def f"}, {"prompt": "return x +"}, {"prompt": "x"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_four_devices(place, tmp_path):
    one, four = tmp_path / "one", tmp_path / "four"
    one.mkdir(), four.mkdir()
    for words in commands(place, one, {}):
        assert main(words) == 0
    spread = {
        "extract": GROUPS,
        "regenerate": GROUPS,
        "generate": FOUR,
    }
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, PROGRAM, json.dumps(commands(place, four, spread))],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    extracted, regenerated, generated = json.loads(done.stdout.splitlines()[-1])
    groups = {"data": 2, "fsdp": 1, "model": 2}
    assert extracted == {"mesh": groups, "rows": 2} and regenerated == {"mesh": groups}
    assert generated == {"mesh": {"data": 1, "fsdp": 1, "model": 4}}

    want, got = open_hidden_states(one / "states"), open_hidden_states(four / "states")
    assert got.index.rows_hash == want.index.rows_hash and len(got) == len(want) > 20
    want, got = (states.batch(range(len(states))) for states in (want, got))
    close(got.aux_hidden_states, want.aux_hidden_states)
    close(got.hidden, want.hidden)
    for name in ("answers.jsonl", "rows.jsonl"):
        assert (four / name).read_text() == (one / name).read_text(), name


def test_refused(place, tmp_path):
    """Before a corpus is read."""
    with pytest.raises(InputError, match="--data-parallel-size: must divide the 3 rows of a batch"):
        options(place, data_parallel_size=2)
    for sizes, words in {
        (2, 1): "--tensor-parallel-size: a target is spread over at most the 1 devices",
        (2, 3): "--tensor-parallel-size x --data-parallel-size: .*; got 6; give less",
        (0, 1): "--tensor-parallel-size: must be 1 or more; got 0",
        (1, -1): "--data-parallel-size: must be 1 or more; got -1",
    }.items():
        with pytest.raises(InputError, match=words):
            parallel_mesh(*sizes)
    assert parallel_mesh(1) is None
    spread = options(place, source="nowhere", tensor_parallel_size=3)
    with pytest.raises(InputError, match="--tensor-parallel-size"):
        extract_hidden_states(place / "target", spread, tmp_path / "out")
