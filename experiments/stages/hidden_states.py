"""The hidden states stage: the target's aux and final hidden states of every row of answers."""

from collections.abc import Sequence
from pathlib import Path

from experiments.budgets import AnswerOptions, Budget
from experiments.stages.answers import answers_stage
from experiments.stages.cache import Log, Stage
from experiments.stages.target import target_stage
from peagle_jax.pipelines.extract import extract_hidden_states
from peagle_jax.pipelines.extraction_options import ExtractionOptions

FOLDER = "hidden_states"  # within the stage's folder


def hidden_states_stage(budget: Budget, answers: AnswerOptions, seq_len: int) -> Stage:
    """`hidden_states`: a folder of `peagle extract`.

    Args:
      seq_len: tokens of a row. Rows shorter than an answer cut it, for the target too.
    """
    aux_layers = budget.aux_hidden_state_layers
    options = {
        "aux_hidden_state_layers": aux_layers,
        "seq_len": seq_len,
        "dtype": budget.hidden_states_dtype,
    }

    def make(folder: Path, parents: Sequence[Path], log: Log) -> None:
        target, source = parents[0] / "model", parents[1] / "answers.jsonl"
        extract_hidden_states(
            target,
            ExtractionOptions(
                source=str(source),
                **options,
                batch_size=16,
                rows_per_shard=None,
                compute_dtype="float32",
                max_chars=None,
                held_out=0.0,
                seed=0,
            ),
            folder / FOLDER,
            log,
            command="python -m experiments.run",
        )

    tokens = answers.num_samples * (answers.prompt_tokens + answers.max_new_tokens)
    item_size = 4 if budget.hidden_states_dtype == "float32" else 2
    num_bytes = tokens * (9 + item_size * (len(aux_layers) + 1) * budget.model.dim)
    parents = (target_stage(budget), answers_stage(budget, answers))
    return Stage("hidden_states", options, (__name__,), parents, num_bytes, make)
