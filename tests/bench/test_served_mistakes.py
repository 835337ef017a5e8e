"""Options of `peagle bench --server` that are wrong, or belong to decoding here, are one line."""

import pytest
import test_served_model
from test_served_model import prompts_file

from peagle_jax.cli import main

server, bench = test_served_model.server, test_served_model.bench  # fixtures


def test_an_unknown_model(bench, tmp_path):
    path = prompts_file(tmp_path, {"prompt": "p"})
    code, _, _, err = bench("--prompts", path, "--server-model", "nobody")
    assert code == 2 and err == [
        "peagle: --server-model: the server lists the-model, another; got nobody; give one of "
        "these names"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "http://127.0.0.1:1"], "/v1/models: the server must answer; got "),
        (["--server", "localhost:8000"], "--server: must be the URL of a server"),
        (["--drafter", "x"], "--drafter: is of decoding in this process"),
        (["-k", "3"], "-k: is of decoding in this process"),
        (["--dtype", "bfloat16"], "--dtype: is of decoding in this process"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype: is of"),
        (["--data-parallel-size", "2"], "--data-parallel-size: is of decoding in this process"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: is of decoding in this process"),
        (["--synthetic-acceptance", "peagle=50"], "--synthetic-acceptance: is of"),
        (["--batch-size", "0"], "--batch-size"),
        (["--repeats", "0"], "--repeats"),
        ([], "--target: without it there must be prompts"),
    ],
)
def test_mistakes_are_one_line(bench, options, words):
    code, _, _, err = bench(*options)
    assert code == 2 and len(err) == 1 and words in err[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server-model", "m", "--target", "t", "--drafter", "d"], "belongs to --server"),
        (
            ["--target", "t"],
            "got no --drafter; give --target MODEL and --drafter HEAD, or --server URL",
        ),
        (
            ["--drafter", "d"],
            "got no --target; give --target MODEL and --drafter HEAD, or --server URL",
        ),
    ],
)
def test_mistakes_without_a_server(capsys, tmp_path, options, words):
    assert main(["bench", "--out", str(tmp_path / "out"), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
