"""Every published configuration at its full size, without its weights, and the heads' recipes.

They are built, sized, and lowered on 8 devices; so are whole training steps of the recipes.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tiny

from peagle_jax.checkpoints.config_writing import vllm_config
from peagle_jax.pipelines import tracing

CONFIGS = Path(__file__).parents[2] / "configs"
# billions of parameters of the text model: model cards (and vLLM's logs) round to these
PUBLISHED = {
    "llama-3.1-8b-instruct": 8.03,
    "qwen3-8b": 8.19,
    "qwen3-coder-30b-a3b-instruct": 30.53,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "gemma-4-31b-it": 30.7,
    "gemma-4-26b-a4b-it": 25.23,
    "gemma-4-e2b": 4.63,
    "gemma-4-e4b": 7.46,
}
RECIPES = [
    path for path in sorted((CONFIGS / "train").glob("*.yaml")) if not path.stem.startswith("demo")
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size(name):
    target = tracing.abstract_target(CONFIGS / "targets" / f"{name}.json")
    one, eight = (tracing.sizes(target, parts) for parts in (1, 8))
    assert round(one.parameters / 1e9, 2) == PUBLISHED[name] and one.bf16 == 2 * one.parameters
    assert one.bf16 / 8 <= eight.bf16 <= one.bf16 / 7 and one.cache / 8 <= eight.cache <= one.cache
    if name.startswith("gpt-oss"):  # OpenAI's card: 12.8 and 60.8 GiB
        assert one.mxfp4 / 2**30 == pytest.approx(
            {"gpt-oss-20b": 12.8, "gpt-oss-120b": 60.8}[name], abs=0.05
        )
        packed = tracing.abstract_target(CONFIGS / "targets" / f"{name}.json", packed=True)
        assert tracing.parameter_bytes(packed.params) == pytest.approx(one.mxfp4, rel=1e-3)


def test_there_are_no_others():
    assert {path.stem for path in (CONFIGS / "targets").glob("*.json")} == PUBLISHED.keys()
    assert {path.stem for path in RECIPES} == {
        path.stem for path in (CONFIGS / "draft").glob("*.json")
    } and len(RECIPES) == 4


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_heads_of_recipes(path):
    """Are what configs/draft says."""
    run, target, head = tracing.recipe(path, CONFIGS / "targets")
    assert vllm_config(head.config, "bfloat16", run.num_depths) == json.loads(
        (CONFIGS / "draft" / f"{path.stem}.json").read_text()
    )
    assert (
        head.config.aux_hidden_state_layers
        == target.config.aux_hidden_state_layers
        == run.head.aux_hidden_state_layers
    )


def test_whole_training_steps_of_recipes():
    """At full size on eight devices, the target's forward, accumulation and optimizer included.

    A device holds what `peagle train --dry-run` says of parameters and of the optimizer; so many
    rows are computed at a time; and the state after a step has the form of the one before.
    """
    program = Path(__file__).with_name("whole_steps.py")
    names = [path.stem for path in RECIPES]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CONFIGS.parent)}
    words = [sys.executable, str(program), *names]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(names) and {row["planned_rows"] for row in rows} == {1, 8}
    for row in rows:
        # the step's number and the optimizer's own are beside what is planned
        assert 0 <= row["bytes"] - row["planned_bytes"] <= 16
        assert row["rows"] == [row["planned_rows"]]
        assert row["state_is_kept"]
        number = [[], "float32"]
        assert row["metrics"] == {
            "loss": [number],
            "grad_norm": [number],
            "accuracy": [[[row["num_depths"]], "float32"]],
        }


def test_a_sliding_window_of_a_recipe(tmp_path):
    """Reaches every layer of the head, and what vLLM reads of it."""
    recipe = (CONFIGS / "train/gpt_oss_20b.yaml").read_text()
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.replace("  mask_token:", "  sliding_window: 4096\n  mask_token:"))
    _, _, head = tracing.recipe(path, CONFIGS / "targets")
    assert head.config.windows == (4096,) * 4
    layers = head.bind(head.params).layers
    assert [layer.attn.window for layer in layers] == [4096] * 4
    written = vllm_config(head.config, "bfloat16", 10)
    assert written["sliding_window"] == 4096
    assert written["layer_types"] == ["sliding_attention"] * 4


@pytest.mark.parametrize("name", ["gpt-oss-20b", pytest.param("all", marks=pytest.mark.long)])
def test_lowered_for_eight_devices(name, tmp_path):
    """In a process of its own, because devices are counted when JAX starts.

    `scripts/generate/size_table.py` does the same for docs/sizes.md.
    """
    only = [] if name == "all" else ["--only", name]
    command = [
        sys.executable,
        "scripts/generate/size_table.py",
        "--out",
        str(tmp_path / "sizes.md"),
        *only,
    ]
    done = subprocess.run(
        command,
        cwd=CONFIGS.parent,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "sizes.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * (len(PUBLISHED) if name == "all" else 1) and all(
        min(row["program_bytes"]) > 100_000 for row in rows
    )
    published = (CONFIGS.parent / "docs/sizes.md").read_text()
    assert all(
        line in published
        for line in (tmp_path / "sizes.md").read_text().splitlines()
        if line.startswith(f"| {name} ")
    )


def test_steps_of_every_method_are_lowered():
    """A head multiplies beside its target, and EAGLE-3's later drafts are a loop of forwards."""

    def as_shapes(model):
        return dataclasses.replace(model, params=jax.eval_shape(lambda: model.params))

    target, head = as_shapes(tiny.target()), as_shapes(tiny.head())

    def counts(head, k, method="peagle"):
        sizes = dict(prompt=4, cache_size=32)
        text = tracing.lower(target, head, k, method=method, **sizes)[1].as_text()
        return text.count("stablehlo.dot_general"), text.count("stablehlo.while")

    plain, peagle, eagle3 = counts(None, 0), counts(head, 3), counts(head, 3, "eagle3")
    assert plain[0] < peagle[0] < eagle3[0]
    assert plain[1] <= peagle[1] < eagle3[1]
