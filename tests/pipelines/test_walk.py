"""docs/walk.md: its commands, run as they stand there, on a tiny target with a chat template."""

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from peagle_jax import weights
from peagle_jax.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "walk.md"
TEMPLATE = Path(__file__).with_name("walk_template.jinja")
VERBS = ("adds", "joins", "sorts", "counts", "prints", "copies")
NOUNS = ("numbers", "words", "lines", "files", "rows", "keys", "names", "trees", "dates", "bytes")


def statements(page: Path) -> list[str]:
    """The commands of a page's code blocks, with their continuation lines joined."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def turn(verb: str, noun: str) -> list[dict]:
    answer = f"def {verb}_{noun}(x):\n    return {verb}({noun}(x))"
    return [
        {"role": "user", "content": f"Write a function that {verb} {noun}."},
        {"role": "assistant", "content": answer},
    ]


def write_conversations(path: Path) -> None:
    """Sixty conversations of one and two turns, some with a system prompt."""
    rows = []
    for i, (verb, noun) in enumerate(itertools.product(VERBS, NOUNS)):
        messages = turn(verb, noun)
        if i % 4 == 0:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        if i % 3 == 0:
            messages += turn(VERBS[(i + 1) % 6], noun)
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_short(recipe: Path) -> None:
    """What a reader changes in the recipe who has a minute."""
    text = recipe.read_text(encoding="utf-8")
    for old, new in {
        r"layers: 4 ": "layers: 2 ",
        r"num_depths: 8\}": "num_depths: 4}",
        r"batch_size: \d+": "batch_size: 4",
        r"depth_schedule: .*": "depth_schedule: []",
        r"steps: 200": "steps: 40",
    }.items():
        text, count = re.subn(old, new, text)
        assert count == 1, old
    recipe.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with conversations, and a target for them as one comes from the hub."""
    place = tmp_path_factory.mktemp("walk")
    write_conversations(place / "conversations.jsonl")
    recipe = {
        "task": "lm",
        "out": str(place / "lm"),
        "model": dict(
            vocab=400, layers=4, dim=48, mlp_dim=96, heads=2, kv_heads=1, head_dim=24, context=1024
        ),
        "data": {
            "source": str(place / "conversations.jsonl"),
            "seq_len": 64,
            "batch_size": 8,
            "max_chars": None,
            "held_out": 0.0,
        },
        "optimizer": {"steps": 150, "peak_lr": 1e-2, "warmup": 10},
    }
    (place / "lm.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(place / "lm.yaml")]) == 0
    target = (place / "lm" / "model").rename(place / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.mask_token = None  # as most chat models
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config["eos_token_id"] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (target / "config.json").write_text(json.dumps(config))
    return place


def run(page: Path, names: dict[str, str], capfd: pytest.CaptureFixture) -> dict[str, list[str]]:
    """Runs a page's commands in the working directory.

    Returns:
      What `peagle COMMAND` printed on stdout and stderr, by command, each time that it ran.
    """
    said: dict[str, list[str]] = {}
    for line in statements(page):
        name, _, value = line.partition("=")
        if name.isidentifier() and name.isupper():
            assert name in names and value, line  # the two that a reader changes
            continue
        for name, value in names.items():
            line = line.replace(f"${name}", value)
        assert "$" not in line, line
        program, *arguments = shlex.split(line)
        if arguments == ["train", "walk/head.yaml"]:
            make_short(Path("walk/head.yaml"))
        if program == "peagle":
            code = main(arguments)
            out, err = capfd.readouterr()
            assert code == 0, (line, err)
            said.setdefault(arguments[0], []).append(out + err)
        else:
            assert program in ("mkdir", "echo"), line
            subprocess.run(["bash", "-ec", line], check=True)
    return said


def read(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def test_the_walk(place, monkeypatch, capfd):
    """Every command ends well, and what it makes is what the page says."""
    monkeypatch.chdir(place)
    said = run(PAGE, {"TARGET": "target", "DATA": "conversations.jsonl"}, capfd)

    assert "qwen3" in said["inspect"][0] and "in parallel (P-EAGLE)" in said["inspect"][1]
    trained = re.findall("⟦(.*?)⟧", said["show-data"][0], re.DOTALL)
    assert trained == [
        f"def {verb}_{noun}(x):\n    return {verb}({noun}(x))<|im_end|>"
        for verb, noun in (("adds", "numbers"), ("joins", "numbers"), ("adds", "words"))
    ]
    answers = [json.loads(line) for line in read("walk/answers.jsonl")]
    asked = [json.loads(line) for line in read("conversations.jsonl")]
    assert len(answers) == len(asked) == 60

    def questions(row: dict) -> list[str]:
        return [m["content"] for m in row["messages"] if m["role"] == "user"]

    # an answer without an end would be token ids, and end its conversation
    whole = [(a, b) for a, b in zip(answers, asked, strict=True) if a["finish_reason"] == "stop"]
    assert len(whole) > 30 and all(questions(a) == questions(b) for a, b in whole)
    assert re.findall("⟦(.*?)⟧", said["show-data"][1], re.DOTALL)[0].endswith("<|im_end|>")

    assert "in all, a device" in said["train"][0] and "fits an H200" in said["train"][0]
    measured = [json.loads(line) for line in read("walk/head/metrics.jsonl")]
    lengths = [row["acceptance_length"] for row in measured if "acceptance_length" in row]
    assert len(lengths) == 2 and max(lengths) > 1.5
    assert re.search(r"acceptance length \d\.\d+ over \d+ steps", said["generate"][0])
    assert "every one is the same, token for token" in said["bench"][0]
    assert Path("walk/bench/report.html").is_file()

    folders = Path("walk/head/head"), Path("walk/served")
    head, served = (weights.open_folder(folder) for folder in folders)
    assert head.keys() == served.keys()
    for name, tensor in head.items():
        wanted = np.asarray(tensor)
        if wanted.dtype == np.float32:
            wanted = wanted.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(served[name]), wanted, err_msg=name)
    line, *advice = said["serve-config"][0].splitlines()
    # on stderr: what else of vLLM's options matters
    assert advice and all(note.startswith(("vLLM ", "at a temperature ")) for note in advice)
    program, serve, model, flag, config = shlex.split(line)
    assert [program, serve, model, flag] == ["vllm", "serve", "target", "--speculative-config"]
    assert json.loads(config) == {
        "method": "eagle3",
        "model": "walk/served",
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }


def test_the_template_is_like_published_ones():
    """The walk would prove less with a template whose prefixes are prefixes of the whole."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(*messages: tuple[str, str]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        texts, _ = render_jinja_template([turns], chat_template=TEMPLATE.read_text())
        return texts[0]

    first = ("user", "a"), ("assistant", "<think>\nb\n</think>\n\nc")
    assert not rendered(*first, ("user", "d")).startswith(rendered(*first))
