"""`peagle generate` and `peagle bench`: what they print and write."""

import json

import jax
import numpy as np
import pytest
import tiny
from transformers import AutoTokenizer

from peagle_jax.decode import loop
from peagle_jax.decode.generate import generate
from peagle_jax.decode.parallel_engine import make_engine
from peagle_jax.pipelines import generate_rows
from peagle_jax.text import END_TURN


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_generate_with_threads(num_threads, folders, peagle, tmp_path, monkeypatch):
    """As many engines as were asked for, with as many rows in all as there are prompts at most."""
    made = []

    def noting(*args, **options):
        assert options["donate_models"]  # nobody else has the models
        made.append(make_engine(*args, **options))
        return made[-1]

    monkeypatch.setattr(generate_rows, "make_engine", noting)
    options = f"--prompts {folders}/prompts.jsonl --max-new-tokens 3 --threads {num_threads}"
    code, _, err = peagle(
        f"generate --target {folders}/target {options} --out {tmp_path}/rows.jsonl"
    )
    assert code == 0, err
    assert made[0].stats.num_threads == num_threads and made[0].max_batch == 3
    assert len(read_rows(tmp_path / "rows.jsonl")) == 3


def test_generate_writes_rows(folders, peagle, tmp_path):
    options = f"--prompts {folders}/prompts.jsonl --max-new-tokens 12 --batch-size 2"
    drafting = f"--drafter {folders}/peagle -k 3"
    rows = {}
    for method, more in {"none": "", "peagle": drafting, "eagle3": drafting}.items():
        out = tmp_path / f"{method}.jsonl"
        code, _, err = peagle(
            f"generate --target {folders}/target --method {method} {options} {more} --out {out}"
        )
        assert code == 0, err
        rows[method] = read_rows(out)
    assert len(rows["none"]) == 3 and rows["none"][1]["prompt_token_ids"] == [9, 8, 7]
    plain_ids = [row["output_token_ids"] for row in rows["none"]]
    for method in ("peagle", "eagle3"):
        assert [row["output_token_ids"] for row in rows[method]] == plain_ids
    row = rows["peagle"][0]
    assert row["num_draft_tokens"] == 3 * row["num_drafts"]
    assert len(row["num_accepted_per_pos"]) == 3
    length = 1 + row["num_accepted_tokens"] / row["num_drafts"]
    assert row["acceptance_length"] == pytest.approx(length)
    assert isinstance(row["text"], str) and row["finish_reason"] == "length"
    assert rows["none"][0]["acceptance_length"] is None


def test_generate_in_fp8(folders, peagle, tmp_path, monkeypatch):
    """The options reach the target, the head and the cache."""
    calls = []
    real = loop.decode

    def watch(spec, target, draft, *rest):
        calls.append((spec.target_config.cache_dtype, target, draft))
        return real(spec, target, draft, *rest)

    monkeypatch.setattr(loop, "decode", watch)
    code, _, err = peagle(
        f"generate --target {folders}/target --drafter {folders}/peagle -k 2 --prompt 'def f' "
        f"--max-new-tokens 6 --dtype fp8 --kv-cache-dtype fp8 --out {tmp_path}/out.jsonl"
    )
    assert code == 0, err
    cache_dtype, target, head = calls[0]
    assert np.dtype(cache_dtype).itemsize == 1
    assert target["blocks"][0]["attn"]["q"]["values"].dtype.itemsize == 1
    assert head["lm_head"]["values"].dtype.itemsize == 1
    assert target["embed"]["table"].dtype == "bfloat16"
    assert len(read_rows(tmp_path / "out.jsonl")[0]["output_token_ids"]) == 6


def test_generate_prints_text_and_samples_by_seed(folders, peagle):
    line = (
        f"generate --target {folders}/target --drafter {folders}/peagle -k 2 --prompt 'def f' "
        "--max-new-tokens 8 --temperature 1.0 --top-k 50 --top-p 0.95"
    )
    first, second, other = (peagle(f"{line} --seed {seed}")[1] for seed in (1, 1, 2))
    assert first == second != other
    assert peagle(f"{line} --seed 1 --greedy-drafts --dtype bfloat16")[0] == 0


def test_a_stream_is_the_text_as_it_is_written(folders, peagle, tmp_path, monkeypatch):
    """In several pieces, which together are the text; what begins like a stop string waits."""
    from peagle_jax.cli import decode_commands

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f"}\n{"prompt": "x = "}\n')
    line = (
        f"generate --target {folders}/target --drafter {folders}/peagle -k 2 --prompts {prompts} "
        "--max-new-tokens 20"
    )
    whole = peagle(line)[1]
    pieces = []
    monkeypatch.setattr(decode_commands, "_print_text", pieces.append)
    code, out, err = peagle(f"{line} --stream")
    assert (code, out) == (0, "") and "acceptance length" in err
    assert "".join(pieces) == whole
    assert len(pieces) > 6 and all(not piece.endswith("\ufffd") for piece in pieces[:-1])

    peagle(f"{line} --out {tmp_path}/out.jsonl")
    text = read_rows(tmp_path / "out.jsonl")[0]["text"]
    stop = text[3:9]
    pieces.clear()
    assert peagle(f"{line} --stream --stop '{stop}'")[0] == 0
    peagle(f"{line} --out {tmp_path}/out.jsonl --stop '{stop}'")
    rows = read_rows(tmp_path / "out.jsonl")
    assert "".join(pieces) == "".join(row["text"] + "\n" for row in rows)
    code, _, err = peagle(f"{line} --stream --out {tmp_path}/out.jsonl")
    assert code == 2 and "--stream: prints to the terminal; got --out" in err


def test_several_answers_of_a_least_length(folders, peagle, tmp_path):
    """Rows of a prompt follow each other, and say which string or token ended them."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f"}\n{"prompt_token_ids": [5, 6]}\n')
    line = f"generate --target {folders}/target --prompts {prompts} --max-new-tokens 14"
    line += f" --out {tmp_path}/out.jsonl --temperature 1.5"
    code, _, err = peagle(f"{line} -n 3 --seed 8")
    assert code == 0, err
    rows = read_rows(tmp_path / "out.jsonl")
    assert [(len(row["prompt_token_ids"]), row["index"]) for row in rows[3:]] == [
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert len({tuple(row["output_token_ids"]) for row in rows}) == 6
    stop_id = rows[4]["output_token_ids"][3]
    peagle(f"{line} --seed 11 --stop-ids {stop_id}")
    ended = read_rows(tmp_path / "out.jsonl")[1]  # a first prompt has taken the seed 11
    assert "index" not in ended and ended["finish_reason"] == "stop"
    assert ended["stop_reason"] == stop_id and len(ended["output_token_ids"]) <= 4
    code, _, err = peagle(f"{line} --seed 11 --stop-ids {stop_id} --min-tokens 9")
    assert code == 0, err
    longer = read_rows(tmp_path / "out.jsonl")[1]["output_token_ids"]
    assert len(longer) >= 9 and stop_id not in longer[:9]
    code, _, err = peagle(f"{line.replace('1.5', '0')} -n 2")
    assert code == 2 and "-n: answers of one prompt differ by sampling; got 2" in err
    code, _, err = peagle(f"{line} --min-tokens 15")
    assert code == 2 and "min_tokens: must lie in 0..max_new_tokens, 14; got 15" in err


@pytest.mark.parametrize("option", ["", "--stream"])
def test_a_prompt_that_does_not_fit_leaves_the_others_their_answers(
    option, folders, peagle, tmp_path
):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "def f"}, {"prompt_token_ids": [5] * 290}, {"prompt": "x = "}]
    rows.append({"prompt": ""})
    prompts.write_text("\n\n".join(map(json.dumps, rows)))
    line = f"generate --target {folders}/target --prompts {prompts} --max-new-tokens 12"
    code, out, err = peagle(f"{line} {option}")
    assert code == 1
    rule = "prompt + new tokens must fit the target's context of 300 tokens; got 290 + 12"
    assert f"peagle: {prompts}:3: {rule}; shorten the prompt" in err
    assert f"peagle: {prompts}:7: must have at least one token" in err
    fitting = tmp_path / "fitting.jsonl"
    fitting.write_text("".join(json.dumps(rows[i]) + "\n" for i in (0, 2)))
    assert out == peagle(f"{line.replace(str(prompts), str(fitting))} {option}")[1]
    if not option:
        code, _, _ = peagle(f"{line} --out {tmp_path}/out.jsonl")
        answers = read_rows(tmp_path / "out.jsonl")
        assert code == 1 and [row["finish_reason"] for row in answers] == [
            "length",
            "error",
            "length",
            "error",
        ]
        assert rule in answers[1]["error"] and answers[1]["prompt_token_ids"] == [5] * 290
    # where none can be answered there is nothing to write
    code, out, err = peagle(f"{line} --out {tmp_path}/none.jsonl --max-new-tokens 299")
    assert code == 2 and ".jsonl:1:" in err and not (tmp_path / "none.jsonl").exists()


def test_every_option_of_sampling_reaches_the_request(folders, peagle, tmp_path):
    line = (
        f"generate --target {folders}/target --drafter {folders}/peagle -k 2 --prompt 'def f' "
        f"--max-new-tokens 12 --out {tmp_path}/out.jsonl"
    )

    def row(options: str) -> dict:
        code, _, err = peagle(f"{line} {options}")
        assert code == 0, err
        return read_rows(tmp_path / "out.jsonl")[0]

    plain = row("")
    assert row("--num-tree-nodes 5") != plain  # other counters
    assert row("--num-tree-nodes 5")["output_token_ids"] == plain["output_token_ids"]
    assert row("--temperature 1.0 --min-p 1.0")["output_token_ids"] == plain["output_token_ids"]
    # tokens that were there before become likelier
    for option in ("--repetition-penalty 0.01", "--presence-penalty -2", "--frequency-penalty -2"):
        assert row(option)["output_token_ids"] != plain["output_token_ids"], option
    first = plain["output_token_ids"][0]
    bias = f"--logit-bias {first}=-99.5 --logit-bias {first + 1}=1e2"
    assert row(bias)["output_token_ids"] == [first + 1] * 12
    code, _, err = peagle(f"{line} --logit-bias 3")
    assert code == 2 and "--logit-bias: must be a token's id and a number; got 3; give" in err
    code, _, err = peagle(f"{line} --logit-bias 99999=1")
    assert code == 2 and "logit_bias" in err
    assert len(row("--logprobs")["logprobs"]) == 12 and "logprobs" not in plain
    token = plain["output_token_ids"][5]
    ended = row(f"--stop-ids 0,{token}")
    end = plain["output_token_ids"].index(token) + 1
    assert ended["output_token_ids"] == plain["output_token_ids"][:end]
    assert ended["finish_reason"] == "stop"
    stop = plain["text"][2:4]
    stopped = row(f"--stop ZZZ --stop '{stop}'")
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"
    # a special token is in no answer's text; it ends the answer where the target writes it
    token = AutoTokenizer.from_pretrained(folders / "target").convert_tokens_to_ids(END_TURN)
    for option in (f"--logit-bias {token}=100", f"--logit-bias {token}=100 --ignore-eos"):
        assert row(option)["output_token_ids"] == [token] * 12
        ended = row(f"{option} --stop '{END_TURN}' --stop ZZZ")
        assert ended["output_token_ids"] == [token] and ended["finish_reason"] == "stop"


def test_one_device_program_and_no_second_compilation(monkeypatch):
    """The host is asked where a row is done, and the same shapes compile nothing a second time."""
    calls, compilations = [], []
    real = loop.decode

    def count(*arguments):
        calls.append(1)
        return real(*arguments)

    def listen(name, *_, **__):
        if "compile" in name:
            compilations.append(name)

    monkeypatch.setattr(loop, "decode", count)
    jax.monitoring.register_event_duration_secs_listener(listen)

    def decode(prompts):
        return generate(tiny.target(), tiny.head(), prompts, k=5, max_new_tokens=30, cache_size=64)

    decode([[1, 2, 3], [4]])
    compilations.clear()
    calls.clear()
    answers = decode([[7, 8], [9, 1, 2, 3, 4]])
    assert not compilations and len(calls) <= 2
    assert sum(len(answer.output_token_ids) for answer in answers) == 60


def test_bench_records_and_reports(folders, peagle, tmp_path):
    code, out, err = peagle(
        f"bench --target {folders}/target --drafter {folders}/peagle --drafter {folders}/eagle3 "
        f"--prompts {folders}/prompts.jsonl -k 1,3 --batch-size 2 --max-new-tokens 8 --repeats 1 "
        f"--out {tmp_path}/out"
    )
    assert code == 0, err
    records = read_rows(tmp_path / "out" / "results.jsonl")
    decoders = [(record["method"], record["k"]) for record in records]
    assert decoders == [("none", 0), ("eagle3", 1), ("eagle3", 3), ("peagle", 1), ("peagle", 3)]
    for record in records[1:]:
        assert record["lossless"] and record["draft_seconds"] > 0 and record["break_even"] > 0
    assert {"commit", "command", "device", "jax", "time"} <= records[0].keys()
    assert "EAGLE-3" in (tmp_path / "out" / "report.html").read_text()
    assert "acceptance length" in out and "…" not in out


def test_bench_with_an_adaptive_k_and_a_tree(folders, peagle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # step times
    code, out, err = peagle(
        f"bench --target {folders}/target --drafter {folders}/peagle --request-rate inf "
        f"--prompts {folders}/prompts.jsonl -k 3,auto --num-tree-nodes 5 --max-new-tokens 8 "
        f"--repeats 1 --ignore-eos --out {tmp_path}/out"
    )
    assert code == 0, err
    for file in ("results.jsonl", "load.jsonl"):
        rows = read_rows(tmp_path / "out" / file)
        assert all(row["ignore_eos"] for row in rows)
        ways = [(row["k"], row["adaptive_k"], row["num_tree_nodes"]) for row in rows]
        assert ways == [(0, False, None), (3, False, None), (6, True, None), (3, False, 5)], file
    assert "K = auto" in out and "K = 3, tree 5" in out
    assert "with K chosen while decoding runs at" in out
