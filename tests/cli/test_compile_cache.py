"""Whether a command finds in JAX's persistent cache what the same command compiled before."""

import os
import subprocess
import sys

import pytest

PROGRAM = "import sys; from peagle_jax.cli import main; sys.exit(main())"
GENERATE = "generate --target {folders}/target --drafter {folders}/peagle -k 3 --max-new-tokens 9 "
GENERATE += "--prompts {folders}/prompts.jsonl --out {tmp}/out.jsonl --threads 1 "
TRAIN = """
task: {task}
target: {folders}/target
out: {tmp}/run
data: {{source: {tmp}/code, held_out: 0, seq_len: 32, batch_size: 2}}
head: {{layers: 1}}
optimizer: {{steps: 2, warmup: 1}}
eval: {{every: null}}
"""
# One for each kind of program; a tree, or a sampled answer, has programs of its own.
COMMANDS = {
    "chain": GENERATE,
    "sampled tree": GENERATE + "--num-tree-nodes 5 --temperature 0.7 --top-k 20",
    "plain": GENERATE.replace("--drafter {folders}/peagle -k 3", "--logprobs"),
    "train peagle": "train {tmp}/peagle.yaml",
    "train eagle3": "train {tmp}/eagle3.yaml",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_another_process_compiles_nothing_anew(command, folders, tmp_path):
    """Also where it hashes strings otherwise, and so has another order in its sets."""
    code, cache = tmp_path / "code", tmp_path / "cache"
    code.mkdir()
    (code / "f.py").write_text("def f(x):\n    return x\n" * 40)
    for task in ("peagle", "eagle3"):
        recipe = TRAIN.format(task=task, folders=folders, tmp=tmp_path)
        (tmp_path / f"{task}.yaml").write_text(recipe)

    def programs(seed: int) -> list[str]:
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONHASHSEED": str(seed),
        }
        words = command.format(folders=folders, tmp=tmp_path).split()
        words = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        if (tmp_path / "run").exists():
            (tmp_path / "run").rename(tmp_path / f"run{seed}")
        return sorted(path.name for path in cache.glob("*-cache"))

    first = programs(1)
    names = {name.partition("-")[0] for name in first}
    assert names & {"jit_decode", "jit_update_of_leaves"}
    assert programs(2) == first
