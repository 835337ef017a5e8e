"""`peagle bench --server`: a served model, by the client that measures our own engine."""

import json
import threading
import time

import pytest

from peagle_jax import text
from peagle_jax.bench.load import CLOSED, serve
from peagle_jax.bench.served_model import (
    ServedModel,
    ServerRequest,
    measure,
    read_counters,
)
from peagle_jax.chat.pieces import Conversation
from peagle_jax.cli import main
from peagle_jax.openai_server import OpenAIServer
from peagle_jax.types import InputError
from tests.http_server import Handler, serving

COUNTERS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {draft_tokens}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
"""
PIECES, TOKENS = 3, 7  # of every answer


class Server(Handler):
    """Answers in three pieces of seven tokens; every step drafts two, and accepts one or both."""

    def do_GET(self):
        server = self.server
        if self.path == "/v1/models":
            models = [{"id": name, "owned_by": "vllm"} for name in ("the-model", "another")]
            self.answer(json.dumps({"data": models}))
        elif self.path == "/version":
            self.answer(json.dumps({"version": "0.32.0"}))
        elif self.path == "/metrics" and server.has_metrics:
            drafts = PIECES * server.num_answered
            counts = {"drafts": drafts, "draft_tokens": 2 * drafts, "first": drafts}
            counts["second"] = server.num_answered
            self.answer(COUNTERS.format(accepted=drafts + server.num_answered, **counts))
        else:
            self.send_error(404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append((self.path, body))
            server.num_running += 1
            server.most = max(server.most, server.num_running)
            number = len(server.bodies)
        is_whole = False
        try:
            is_whole = self.send_answer(body, is_cut_off=number > server.dies_after)
        finally:
            # before the end mark: the client may send the next request as soon as it has that
            with server.lock:
                server.num_running -= 1
        if is_whole:
            self.wfile.write(b"data: [DONE]\n\n")

    def send_answer(self, body, is_cut_off):
        if self.server.refusal:
            self.answer(self.server.refusal, 400)
            return False
        self.send_response(200)
        self.end_headers()
        is_chat = "messages" in body
        if is_chat:
            self.send_piece({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(PIECES):
            if is_cut_off and i == 1:
                return False  # the connection is closed without a word
            if i == 1:
                self.server.goes_on.wait(timeout=30)
            time.sleep(self.server.pause)
            text = f"{i} "
            said = {"delta": {"content": text}} if is_chat else {"text": text}
            reason = "length" if i == PIECES - 1 else None
            self.send_piece({"choices": [said | {"finish_reason": reason}]})
        # counters are those of a server that adds its last step after it sent the tokens
        usage = {"prompt_tokens": 4, "completion_tokens": TOKENS}
        if self.server.has_usage:
            self.send_piece({"choices": [], "usage": usage})
        with self.server.lock:
            self.server.num_answered += 1
        return True

    def send_piece(self, content):
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def server():
    goes_on = threading.Event()
    goes_on.set()
    with serving(
        Server,
        bodies=[],
        lock=threading.Lock(),
        pause=0.02,
        num_answered=0,
        num_running=0,
        most=0,
        has_metrics=True,
        has_usage=True,
        refusal=None,
        dies_after=10**6,
        goes_on=goes_on,
    ) as server:
        yield server


def connect(server, model=None):
    return OpenAIServer(server.url, model, "look at the server's log")


def requests(count, prompt=(1, 2, 3)):
    return [ServerRequest([*prompt, i], 9) for i in range(count)]


@pytest.fixture
def bench(server, tmp_path, capsys, monkeypatch):
    """Runs `peagle bench --server`: exit code, rows, stdout, lines of stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*options):
        words = ["bench", "--server", server.url, "--out", str(tmp_path / "out")]
        words += ["--max-new-tokens", "9", "--repeats", "1", *map(str, options)]
        code = main(words)
        captured = capsys.readouterr()
        path = tmp_path / "out" / "load.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        return code, [json.loads(row) for row in rows], captured.out, captured.err.splitlines()

    return run


def prompts_file(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- times and counters


def test_a_closed_loop(server):
    model = ServedModel(connect(server), 2)
    served = serve(model, requests(5), CLOSED)
    assert server.most == 2 and len(served) == 5
    for seen in served:
        # three pieces, and the number of tokens that the server said
        assert len(seen.arrivals) == PIECES and seen.num_tokens == TOKENS
        assert seen.first >= server.pause
        assert seen.whole >= PIECES * server.pause
        assert seen.per_token == pytest.approx((seen.whole - seen.first) / (TOKENS - 1))
    assert served[2].sent >= served[0].whole or served[2].sent >= served[1].whole


def test_a_piece_is_news_before_the_next_is_sent(server):
    server.goes_on.clear()
    model = ServedModel(connect(server), 1)
    begin = time.perf_counter()
    model.add(requests(1)[0])
    first = []
    while not first:
        first += model.step()
    heard = time.perf_counter()
    server.goes_on.set()
    assert [piece.num_new_tokens for piece in first] == [1] and first[0].answer is None
    others = []
    while not others or others[-1].answer is None:
        others += model.step()
    assert [piece.num_new_tokens for piece in others] == [1] * (PIECES - 1) + [0]
    assert begin + server.pause <= first[0].time <= heard
    # the server paused again after it was allowed to go on
    times = [piece.time for piece in others]
    assert times == sorted(times) and times[0] >= heard + server.pause


def test_the_role_that_begins_a_chat_is_no_token(server):
    prompt = Conversation(({"role": "user", "content": "hi"},))
    [seen] = serve(ServedModel(connect(server), 1), [ServerRequest(prompt, 9)], CLOSED)
    assert len(seen.arrivals) == PIECES and seen.first >= server.pause
    assert seen.answer.text == "0 1 2 "


def test_no_more_requests_than_places_are_under_way(server):
    answers = ServedModel(connect(server), 2).run(requests(5))
    assert len(answers) == 5 and server.most == 2
    assert all(answer.is_cut and answer.num_prompt_tokens == 4 for answer in answers)


def test_an_open_loop_waits_for_nobody(server):
    server.pause = 0.05
    served = serve(ServedModel(connect(server), 1), requests(6), 200.0)
    assert server.most > 1 and [seen.num_tokens for seen in served] == [TOKENS] * 6
    # whatever it waited counts from when it was due
    assert min(seen.first for seen in served) >= server.pause


def test_results_have_the_counters_of_one_pass(server):
    connection = connect(server)
    model = ServedModel(connection, 2)
    model.run(requests(3))
    result, failure = measure(connection, model, requests(4), CLOSED, 0)
    assert failure is None and result["completed"] == 4 and result["failed"] == 0
    assert result["total_input_tokens"] == 4 * 4 and result["total_output_tokens"] == 4 * TOKENS
    # three drafts of two tokens an answer; the first always accepted, the second in one of three
    assert result["k"] == 2 and result["spec_decode_num_drafts"] == 12
    assert result["spec_decode_draft_tokens"] == 24
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + 16 / 12)
    assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx([1, 1 / 3])
    assert result["output_throughput"] == pytest.approx(4 * TOKENS / result["duration"])


def test_counters_of_several_engines_add_up():
    one = COUNTERS.format(drafts=5, draft_tokens=10, accepted=7, first=5, second=2)
    found = read_counters(one + one.replace('engine="0"', 'engine="1"'))
    assert found.num_drafts == 10 and found.num_draft_tokens == 20
    assert found.num_accepted_per_pos == (10, 4)
    assert read_counters(None) is None and read_counters("vllm:num_requests_running 1.0") is None


def test_a_server_without_counters(server):
    server.has_metrics = False
    connection = connect(server)
    result, failure = measure(connection, ServedModel(connection, 1), requests(1), CLOSED, 0)
    assert failure is None and result["k"] is None
    assert not any(key.startswith("spec_decode") for key in result)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a tokenizer, which is all that a server's client reads of a target."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n" * 50], 300)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def test_token_ids_are_those_that_would_be_decoded_here(server, target, bench, tmp_path):
    path = prompts_file(tmp_path, {"prompt": "def f"}, {"turns": ["return x"]})
    code, rows, out, err = bench("--target", target, "--prompts", path, "--batch-size", "1,2")
    assert code == 0, err
    tokenizer = text.load_tokenizer(target)
    want = text.read_prompts(path, tokenizer)
    # one to warm up and two, then two and two
    assert [body["prompt"] for _, body in server.bodies][:3] == [want[0], *want]
    assert len(server.bodies) == 7 and server.most == 2
    for path, body in server.bodies:
        assert path == "/v1/completions" and body["model"] == "the-model"
        assert body["stream"] and body["max_tokens"] == 9 and body["temperature"] == 0
        assert "ignore_eos" not in body
    assert [row["max_concurrency"] for row in rows] == [1, 2]
    for row in rows:
        assert row["engine"] == "vllm 0.32.0" and row["model"] == "the-model" and row["k"] == 2
        assert row["name"] == "bench/load" and row["commit"] and row["target"] == target.name
        assert row["median_ttft_ms"] > 0 and row["p99_tpot_ms"] > 0 and row["p99_e2el_ms"] > 0
    assert "vllm 0.32.0: the-model" in out and "2/2" in out and "2.33" in out


def test_an_open_loop_has_no_concurrency_and_is_measured_once(server, bench, tmp_path):
    path = prompts_file(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    rates = ("--request-rate", "inf", "--request-rate", "50")
    code, rows, out, err = bench("--prompts", path, "--batch-size", "1,2", *rates)
    assert code == 0, err
    measured = [(row["max_concurrency"], row["request_rate"]) for row in rows]
    assert measured == [(1, "inf"), (2, "inf"), (None, 50.0)]
    assert all(row["completed"] == 2 for row in rows) and "None" not in out


def test_conversations_and_options_of_the_template_are_sent(server, bench, tmp_path):
    said = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = prompts_file(tmp_path, {"messages": said, "tools": tools}, {"prompt": "x"})
    options = ("--chat-template-kwargs", '{"enable_thinking": false}')
    code, _, _, err = bench("--prompts", path, *options)
    assert code == 0, err
    (_, first), (_, second) = server.bodies[1:3]
    assert first["messages"] == said and first["tools"] == tools
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert second["prompt"] == "x" and "chat_template_kwargs" not in second
    code, _, _, err = bench("--target", tmp_path, *options)
    assert code == 2 and "--chat-template-kwargs: are of chats; got excerpts" in "".join(err)


def test_without_a_target_texts_and_chats_are_sent(server, bench, tmp_path):
    path = prompts_file(tmp_path, {"prompt": "def f"}, {"turns": ["hi", "you"]}, {"prompt": "x"})
    options = ("--prompts", path, "--server-model", "another", "--ignore-eos", "--repeats", 2)
    code, rows, _, err = bench(*options)
    assert code == 0, err
    assert [row["round"] for row in rows] == [0, 1]
    (_, first), (chat, second), (_, third) = server.bodies[1:4]
    assert first["prompt"] == "def f" and third["prompt"] == "x"
    assert chat == "/v1/chat/completions"
    assert second["messages"] == [{"role": "user", "content": "hi"}]
    assert {body["model"] for _, body in server.bodies} == {"another"}
    assert all(body["ignore_eos"] is True for _, body in server.bodies)
    assert all(row["total_output_tokens"] == 3 * TOKENS for row in rows)


def test_turns_hold_the_servers_own_answers(server, bench, tmp_path):
    path = prompts_file(tmp_path, {"turns": ["a", "b"]}, {"turns": ["c"]})
    code, rows, out, err = bench("--sets", path)
    assert code == 0, err
    said = [body["messages"] for _, body in server.bodies]
    assert said[0] == [{"role": "user", "content": "a"}]  # the answer between the turns
    # one to warm up, then all first turns, and the second one
    assert [messages[-1]["content"] for messages in said[2:]] == ["a", "c", "b"]
    assert said[-1][1] == {"role": "assistant", "content": "0 1 2 "}
    [row] = rows
    assert row["num_questions"] == 2 and row["num_answers_cut"] == 1 and row["completed"] == 3
    assert "answers between turns are written by the server" in out


# ---------------------------------------------------------------- mistakes


def test_a_server_that_dies_keeps_what_was_measured(server, bench, tmp_path):
    path = prompts_file(tmp_path, *[{"prompt": f"p{i}"} for i in range(6)])
    server.dies_after = 4  # the one that warms up, and three
    code, rows, out, err = bench("--prompts", path)
    assert code == 2 and len(err) == 1
    assert "breaks off" in err[0] and f"{path}:4" in err[0] and "look at the server's log" in err[0]
    [row] = rows
    assert (row["completed"], row["failed"]) == (3, 1) and row["total_output_tokens"] == 3 * TOKENS
    assert "3 of 6 requests" in out and "load.jsonl" in out and "3/4" in out
    assert len(server.bodies) == 5  # nothing is sent after a failure


def test_what_is_under_way_when_one_fails_is_awaited(server):
    server.dies_after = 2
    served = serve(ServedModel(connect(server), 3), requests(9), CLOSED)
    assert len(served) == 3 and all(seen.answer is not None for seen in served)
    assert sum(seen.answer.error is None for seen in served) == 2


def test_a_server_that_dies_at_once(server, bench, tmp_path):
    path = prompts_file(tmp_path, {"prompt": "p"}, {"prompt": "q"})
    server.dies_after = 1
    code, rows, out, err = bench("--prompts", path)
    assert code == 2 and len(err) == 1 and "breaks off" in err[0]
    assert rows == [] and "nothing was measured" in out


def test_a_server_that_refuses(server, bench, tmp_path):
    server.refusal = '{"error": {"message": "too long:\\nat most 4 tokens"}}'
    code, _, _, err = bench("--prompts", prompts_file(tmp_path, {"prompt": "p"}))
    assert code == 2 and len(err) == 1 and "400" in err[0] and "at most 4 tokens" in err[0]


def test_an_error_within_the_stream(server, monkeypatch):
    monkeypatch.setattr(
        Server,
        "send_answer",
        lambda self, *_, **__: self.answer('data: {"error": {"message": "out of memory"}}\n\n'),
    )
    with pytest.raises(InputError, match="out of memory"):
        ServedModel(connect(server), 1).run(requests(1))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ('data: {"choices": 5}\n\ndata: [DONE]\n', "TypeError"),
        ("data: 7\n\n", "must answer; got 7"),
        ("data: {\n\n", "must answer"),
        ("<html>", "breaks off"),
        (
            'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, '
            '"completion_tokens": Infinity}}\n\ndata: [DONE]\n',
            "OverflowError",
        ),
    ],
)
def test_what_is_no_answer_is_a_line_and_no_hang(server, monkeypatch, reply, words):
    monkeypatch.setattr(Server, "send_answer", lambda self, *_, **__: self.answer(reply))
    with pytest.raises(InputError, match=words):
        ServedModel(connect(server), 1).run(requests(1))


def test_reasoning_is_no_part_of_what_was_said(server, monkeypatch):
    """No later turn's prompt has it. vLLM sent it under two names for a while."""
    deltas = [{"reasoning": "so", "reasoning_content": "so"}, {"reasoning_content": " it"}]
    deltas += [{"reasoning": " is"}, {"content": ": yes"}]
    pieces = [{"choices": [{"delta": delta}]} for delta in deltas]
    pieces.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 4}})
    stream = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n"
    monkeypatch.setattr(Server, "send_answer", lambda self, *_, **__: self.answer(stream))
    (answer,) = ServedModel(connect(server), 1).run(requests(1))
    assert answer.text == ": yes" and answer.num_tokens == 4


def test_a_server_that_does_not_count(server):
    server.has_usage = False
    with pytest.raises(InputError, match="usage.prompt_tokens"):
        ServedModel(connect(server), 1).run(requests(1))
