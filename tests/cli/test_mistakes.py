"""Every mistake is one line on stderr with exit code 2, and leaves nothing half-written."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ASK = "generate --target {target} --prompt x"
PROMPTS = "generate --target {target} --prompts {tmp}"
BENCH = "bench --target {target} --drafter {peagle} --out {tmp}/b"

# name: (command, words of the message)
DECODING = {
    "missing checkpoint": ("generate --target nowhere --prompt x", ["nowhere", "must exist"]),
    "truncated checkpoint": (
        "generate --target {cut} --prompt x",
        ["cut/model.safetensors", "truncated"],
    ),
    "tokenizer too large": (
        "generate --target {few_rows} --prompt x",
        ["few_rows", "has 43 rows", "a tokenizer that needs"],
    ),
    "target is a drafter": (
        "generate --target {peagle} --prompt x",
        ["peagle/config.json", "must be a target's config"],
    ),
    "no chunk": (f"{ASK} --prefill-chunk 0", ["prefill_chunk", "got 0"]),
    "drafter of another width": (f"{ASK} --drafter {{wide}}", ["wide", "width 24; got 25"]),
    "drafter of another vocabulary": (f"{ASK} --drafter {{other_vocab}}", ["vocab", "got 43"]),
    "drafter with a layer too high": (f"{ASK} --drafter {{high_layer}}", ["0..4", "[9]"]),
    "drafter is a target": (f"{ASK} --drafter {{target}}", ["target", "must be a draft head"]),
    "parallel drafting without placeholders": (
        f"{ASK} --drafter {{eagle3}} --method peagle",
        ["method: parallel drafting needs a mask token", "use eagle3"],
    ),
    "method without drafter": (f"{ASK} --method peagle", ["--method", "no --drafter"]),
    "no batch": (f"{ASK} --batch-size 0", ["--batch-size", "got 0"]),
    "no threads": (f"{ASK} --threads 0", ["--threads", "got 0"]),
    "prompt longer than the context": (
        "generate --target {target} --prompt '" + "x " * 200 + "'",
        ["--prompt: prompt + new tokens must fit", "300"],
    ),
    "K below 1": (f"{ASK} --drafter {{peagle}} -k 0", ["K", "got 0"]),
    "no new tokens": (f"{ASK} --max-new-tokens 0", ["max_new_tokens", "got 0"]),
    "empty prompt": ("generate --target {target} --prompt ''", ["at least one token"]),
    "temperature below 0": (f"{ASK} --temperature -1", ["temperature", "-1"]),
    "temperature not a number": (f"{ASK} --temperature nan", ["temperature", "nan"]),
    "seed below 0": (
        f"{ASK} --temperature 1 --seed -1",
        ["seed: must lie", "-1", "use a seed of 0"],
    ),
    "no place for rows, before models are read": (
        "bench --target nowhere --drafter nowhere --out {cut}/config.json/b",
        ["config.json/b: the output folder must be writable"],
    ),
    "a dtype of a server's target": (
        "regenerate --target {target} --server http://localhost:1 --dtype bfloat16 --out {tmp}/a",
        ["--dtype: is of a target that writes here", "leave out --dtype or --server"],
    ),
    "answers over the prompts": (
        "generate --target {target} --prompts {tmp}/p.jsonl --out {tmp}/./p.jsonl",
        ["--out: answers must not replace the prompts", "name another file"],
    ),
    "K without a head": (f"{ASK} -k 3", ["-k: tokens are drafted by a head", "--drafter"]),
    "greedy drafts without a head": (
        f"{ASK} --greedy-drafts",
        ["--greedy-drafts: tokens are drafted by a head", "leave out --greedy-drafts"],
    ),
    "a tree without a head": (
        f"{ASK} --num-tree-nodes 4",
        ["--num-tree-nodes: tokens are drafted"],
    ),
    "threads of groups of devices": (
        f"{ASK} --threads 2 --data-parallel-size 2",
        ["--threads: is of a target on one device; got --data-parallel-size 2"],
    ),
    "more groups of devices than prompts at a time": (
        f"{ASK} --batch-size 3 --data-parallel-size 4",
        ["--data-parallel-size: must be at most the number decoded together, 3; got 4"],
    ),
    "groups of devices for a stream": (
        f"{ASK} --stream --data-parallel-size 2",
        ["--data-parallel-size: must be at most the number decoded together, 1", "--stream"],
    ),
    "threads of several devices": (
        f"{ASK} --threads 2 --tensor-parallel-size 2",
        ["--threads: is of a target on one device; got --tensor-parallel-size 2"],
    ),
    "stop tokens and none": (
        f"{ASK} --stop-ids 4 --ignore-eos",
        ["--stop-ids: take the place of end-of-sequence tokens; got --ignore-eos, too"],
    ),
    "a stop token in words": (
        f"{ASK} --stop-ids end",
        ["--stop-ids: must be numbers of 0"],
    ),
    "K that is no number": (
        f"{ASK} --drafter {{peagle}} -k many",
        ["-k/--num-speculative-tokens: must be a number, or auto; got 'many'"],
    ),
    "a tree of too many nodes": (
        f"{ASK} --drafter {{peagle}} --num-tree-nodes 257",
        ["num_tree_nodes: at most 256 drafts", "got 257"],
    ),
    "a tree of too many paths": (
        f"{ASK} --drafter {{peagle}} -k 11 --num-tree-nodes 256",
        ["num_tree_nodes: at most 100,000 paths", "with 256 nodes and K = 11; use 32, or a lower"],
    ),
    "a tree that is wider than K allows": (
        f"{ASK} --drafter {{peagle}} -k 1 --num-tree-nodes 17",
        ["num_tree_nodes: with K = 1 and 16 continuations", "got 17; use at most 16"],
    ),
    "options of no chat": (
        f"{ASK} --chat-template-kwargs {{{{}}}}",
        ["--chat-template-kwargs: are of chats; got a text to continue; give them as messages"],
    ),
    "options of a template that are no JSON": (
        "show-data --target {target} --data {tmp} --chat-template-kwargs enable_thinking",
        ["--chat-template-kwargs: must be a JSON object; got enable_thinking; write it as"],
    ),
    "options of a template that are a list": (
        "show-data --target {target} --data {tmp} --chat-template-kwargs [1]",
        ["--chat-template-kwargs: must be a JSON object; got [1]"],
    ),
    "an option that the template does not read": (
        "show-data --target {target} --data {tmp} --chat-template-kwargs '{{\"thinking\":1}}'",
        ["--chat-template-kwargs: the target's chat template reads no option; got thinking"],
    ),
    "log-probabilities that nobody sees": (f"{ASK} --logprobs", ["--logprobs", "no --out"]),
    "an output with a long name": (
        f"{ASK} --out {{tmp}}/" + "n" * 300,
        ["the output file must be writable; got File name too long"],
    ),
    "output is a folder": (f"{ASK} --out {{cut}}", ["cut", "writable"]),
    "unwritable output": (
        f"{ASK} --max-new-tokens 4 --out {{tmp}}/file/x",
        ["file/x", "writable"],
    ),
    "unknown option": (f"{ASK} --speed 9", ["generate", "--speed 9", "peagle generate --help"]),
    "option without a value": (f"{ASK} -k", ["-k/--num-speculative-tokens"]),
    "unwritable demo": ("demo --out {tmp}/file/x", ["file/x", "writable"]),
}
PROMPT_FILES = {
    "token ids of another kind": (f"{PROMPTS}/ids.jsonl", ["ids.jsonl:1", "whole numbers"]),
    "turns of another kind": (f"{PROMPTS}/turns.jsonl", ["turns.jsonl:1", "turns"]),
    "prompts below a file": (f"{PROMPTS}/file/x", ["file/x", "readable"]),
    "empty prompt file": (f"{PROMPTS}/empty.jsonl", ["empty.jsonl", "at least one prompt"]),
    "not UTF-8": (f"{PROMPTS}/latin.jsonl", ["latin.jsonl", "UTF-8", "0xe9"]),
    "no prompt file": (f"{PROMPTS}/no.jsonl", ["no.jsonl", "must exist"]),
}
BENCHES = {
    "no repeats": (f"{BENCH} --repeats 0", ["--repeats", "0"]),
    "two heads of a kind": (f"{BENCH} --drafter {{peagle}}", ["two for peagle"]),
    "one new token": (f"{BENCH} --max-new-tokens 1", ["ask for 2 or more"]),
    "bad list of K": (f"{BENCH} -k 1,x", ["--num-speculative-tokens", "1,x"]),
    "a tree with no K": (f"{BENCH} -k auto --num-tree-nodes 8", ["--num-tree-nodes", "-k 7,auto"]),
    "a tree that is wider than K = 1 allows": (
        f"{BENCH} -k 1,5 --num-tree-nodes 8,32",
        ["num_tree_nodes: with K = 1 and 16 continuations of a draft there are 16 nodes; got 32"],
    ),
    "a tree of drafts at given rates": (
        f"{BENCH} -k 2 --num-tree-nodes 8 --synthetic-acceptance peagle=60,40",
        ["--num-tree-nodes", "a chain; got --synthetic-acceptance, too"],
    ),
    "rates for fewer drafts than auto may take": (
        f"{BENCH} -k 2,auto --synthetic-acceptance peagle=60,40",
        ["--synthetic-acceptance", "peagle drafts up to 6 tokens", "got 2"],
    ),
    "an empty K": (f"{BENCH} -k auto,", ["--num-speculative-tokens", "separated by commas"]),
    "a tree of no node": (f"{BENCH} -k 2 --num-tree-nodes 0", ["--num-tree-nodes", "got 0"]),
    "a tree of an EAGLE-3 head": (
        "bench --target {target} --drafter {eagle3} --out {tmp}/b -k 2 --num-tree-nodes 8",
        ["--num-tree-nodes", "drafted by P-EAGLE heads; got eagle3"],
    ),
    "bad list of batch sizes": (f"{BENCH} --concurrency 0", ["--batch-size", "got 0"]),
}
CHECKPOINTS = {
    "over a folder of runs": (
        "convert {peagle} {folders} --to vllm",
        ["only a checkpoint folder is replaced"],
    ),
    "unwritable folder": ("convert {peagle} {tmp}/file/x --to vllm", ["file/x", "writable"]),
    "output is a file": ("convert {peagle} {tmp}/file --to vllm", ["file", "must be a folder"]),
    "K for a target": (
        "convert {target} {tmp}/x --to hf -k 3",
        ["peagle: -k: --to hf has no use for it; got 3; leave out -k"],
    ),
    "target for a target": (
        "convert {target} {tmp}/x --to hf --target {target}",
        ["--target", "has no use for it", "leave out --target"],
    ),
    "sharing without a target": (
        "convert {peagle} {tmp}/x --to vllm --share-embedding",
        ["--share-embedding", "needs the --target"],
    ),
    "shards without a unit": (
        "convert {peagle} {tmp}/x --to vllm --max-shard-size 12",
        ["--max-shard-size", "5GB"],
    ),
    "into a folder above": (
        "convert {tmp}/above/checkpoints {tmp}/above --to vllm",
        ["above: only a checkpoint folder that peagle wrote is replaced"],
    ),
    "onto itself": ("convert {peagle} {peagle} --to vllm", ["another folder"]),
    "unknown choice": ("convert {peagle} {tmp}/x --to onnx", ["onnx", "peagle convert --help"]),
    "inspect nothing": ("inspect {tmp}/file", ["must exist", "a file"]),
    "serve with K of 0": ("serve-config {peagle} --engine vllm -k 0", ["K must be 1"]),
    "serve a target": ("serve-config {target} --engine vllm", ["must be a draft head"]),
}
TRAINING = {
    "unknown key": ("train {tmp}/run.yaml", ["run.yaml", "unknown speed", "remove"]),
    "missing key": ("train {tmp}/lacking.yaml", ["lacking.yaml", "no model", "add it"]),
    "unknown task": ("train {tmp}/odd.yaml", ["odd.yaml", "got chess"]),
    "no config": ("train {tmp}/no.yaml", ["no.yaml", "must exist"]),
    "config is a folder": ("train {tmp}", ["readable"]),
    "no samples": (
        "regenerate --target {target} --out {tmp}/a.jsonl --num-samples 0",
        ["--num-samples", "got 0"],
    ),
    "answers longer than the context": (
        "regenerate --target {target} --out {tmp}/new/a.jsonl --max-new-tokens 5000",
        ["--max-new-tokens: prompt", "context of 300", "got 1 + 5000", "--max-new-tokens 299"],
    ),
    "answers and excerpts longer than the context": (
        "regenerate --target {target} --data {tmp}/code --out {tmp}/new/a.jsonl --held-out 0 "
        "--prompt-tokens 200 --max-new-tokens 101",
        ["--max-new-tokens", "got 200 + 101", "use --max-new-tokens 100 or less"],
    ),
    "share of all documents": (
        "regenerate --target {target} --out {tmp}/a.jsonl --held-out 1",
        ["--held-out", "got 1"],
    ),
    "temperature below 0 for answers": (
        "regenerate --target {target} --out {tmp}/a.jsonl --temperature 0 -1",
        ["--temperature", "got -1"],
    ),
}
COMMANDS = {
    "no such command": ("explain x", ["explain", "run peagle --help"]),
}
CASES = DECODING | PROMPT_FILES | BENCHES | CHECKPOINTS | TRAINING | COMMANDS


@pytest.fixture
def places(folders, tmp_path):
    """The names in the commands above, and files that are wrong in some way."""
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (tmp_path / "file").write_text("")
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": ["a"]}\n')
    (tmp_path / "turns.jsonl").write_text('{"turns": "hello"}\n')
    (tmp_path / "run.yaml").write_text("task: lm\nout: x\nspeed: 3\n")
    (tmp_path / "lacking.yaml").write_text("task: lm\nout: x\n")
    (tmp_path / "odd.yaml").write_text("task: chess\n")
    shutil.copytree(folders / "peagle", tmp_path / "above" / "checkpoints")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "f.py").write_text("def f(x):\n    return x\n" * 50)
    target, cut = folders / "target", tmp_path / "cut"
    cut.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (cut / name).write_bytes((target / name).read_bytes())
    (cut / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:-100])
    names = ("target", "few_rows", "peagle", "eagle3", "wide", "other_vocab", "high_layer")
    checkpoints = {name: folders / name for name in names}
    return {"tmp": tmp_path, "cut": cut, "folders": folders, **checkpoints}


@pytest.mark.parametrize("command, words", CASES.values(), ids=CASES.keys())
def test_every_mistake_is_one_line(command, words, places, peagle):
    before = sorted(places["tmp"].rglob("*"))
    code, _, err = peagle(command.format(**places))
    assert code == 2, err
    assert err.startswith("peagle: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), f"{err!r} should have {words}"
    assert sorted(places["tmp"].rglob("*")) == before, "something was left behind"


def test_overrides_must_be_keys_of_the_recipe(peagle):
    recipe = ROOT / "configs" / "train" / "demo_target.yaml"
    code, _, err = peagle(f"train {recipe} --optimizer.speed 3")
    assert code == 2 and "--optimizer.speed" in err and err.count("\n") == 1


def test_overrides_must_go_together(peagle, tmp_path):
    recipe = ROOT / "configs" / "train" / "demo_peagle.yaml"
    code, _, err = peagle(f"train {recipe} --out {tmp_path}/x --optimizer.steps 4000")
    assert code == 2 and err.count("\n") == 1, err
    assert not (tmp_path / "x").exists()


def test_a_target_has_no_hidden_states_dir(peagle, tmp_path):
    """--hidden-states-dir is the key of that name, and a target's recipe has none."""
    recipe = ROOT / "configs" / "train" / "demo_target.yaml"
    for spelling in ("--hidden-states-dir", "--features"):
        code, _, err = peagle(f"train {recipe} {spelling} {tmp_path}")
        assert code == 2 and "hidden" in err and err.count("\n") == 1, err
