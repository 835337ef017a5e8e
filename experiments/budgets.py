"""How large everything is: a target that is trained here, its text, and every head's base run."""

import dataclasses

from peagle_jax.pipelines.budgets import lm_shape
from peagle_jax.train.config import LmShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """The text that heads learn from: the target's own continuations of excerpts of the corpus.

    Attributes:
      num_samples: how many continuations.
      prompt_tokens: length of each excerpt.
      max_new_tokens: tokens that the target writes after each excerpt.
      temperatures: every batch of answers takes the next one. Without temperatures, the answer is
        the corpus's own continuation.
    """

    num_samples: int
    prompt_tokens: int
    max_new_tokens: int
    temperatures: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Sizes of one scale of experiments. Results of different budgets cannot be compared."""

    minutes: float  # of one run of the base, on the machine that `measured_on` names
    measured_on: str
    chars: int | None  # of each kind of text; None takes all
    model: LmShape
    lm_steps: int
    lm_batch_size: int
    lm_seq_len: int
    lm_peak_lr: float
    answers: AnswerOptions
    num_prompts: int  # of each kind of text
    temperature: float  # of measurements that name none
    sample_drafts: bool  # likewise
    on_text: bool  # likewise
    max_new_tokens: int
    k: int  # depths in training, and tokens drafted in a step
    layers: int
    aux_hidden_state_layers: tuple[int, ...]
    seq_len: int
    hidden_states_dtype: str  # of the hidden states on disk
    stage_minutes: float  # of everything that runs share, once
    batch_size: int
    steps: int
    peak_lr: float
    num_speed_prompts: int  # decoded one at a time, for tokens per second
    repeats: int


SMALL = Budget(
    minutes=4,
    measured_on="one core of an AMD EPYC",
    chars=1_700_000,
    model=lm_shape(1024, 6, 128, 384, 4, 2, 32, 1024),
    lm_steps=2400,
    lm_batch_size=8,
    lm_seq_len=256,
    lm_peak_lr=4e-3,
    answers=AnswerOptions(
        num_samples=4096, prompt_tokens=32, max_new_tokens=96, temperatures=(0.0,)
    ),
    num_prompts=40,
    temperature=0.0,
    sample_drafts=False,
    on_text=False,
    max_new_tokens=64,
    k=5,
    layers=2,
    aux_hidden_state_layers=(1, 4, 5),
    seq_len=128,
    hidden_states_dtype="float32",
    stage_minutes=20,
    batch_size=2,
    steps=2400,
    peak_lr=3e-3,
    num_speed_prompts=6,
    repeats=3,
)

BUDGETS = {
    "smoke": Budget(
        minutes=0.5,
        measured_on="2 CPU cores",
        chars=60_000,
        model=lm_shape(512, 4, 64, 160, 4, 2, 16, 512),
        lm_steps=60,
        lm_batch_size=4,
        lm_seq_len=128,
        lm_peak_lr=4e-3,
        answers=AnswerOptions(
            num_samples=96, prompt_tokens=16, max_new_tokens=48, temperatures=(0.0,)
        ),
        num_prompts=2,
        temperature=0.0,
        sample_drafts=False,
        on_text=False,
        max_new_tokens=16,
        k=3,
        layers=1,
        aux_hidden_state_layers=(1, 2, 3),
        seq_len=64,
        hidden_states_dtype="float32",
        stage_minutes=1,
        batch_size=2,
        steps=16,
        peak_lr=3e-3,
        num_speed_prompts=1,
        repeats=1,
    ),
    "small": SMALL,
    # small's target and text, sampled: it hardly repeats itself, as greedy text of a weak target
    # does. Acceptance is computed along the text, so that no draws of it add to the noise.
    "sampled": dataclasses.replace(
        SMALL,
        minutes=5,
        measured_on="one of 2 cores of an Intel Xeon",
        answers=dataclasses.replace(SMALL.answers, temperatures=(0.7,)),
        temperature=0.7,
        sample_drafts=True,
        on_text=True,
        max_new_tokens=96,
        k=7,
    ),
    "full": Budget(
        minutes=20,
        measured_on="one H200 (an estimate, it never ran)",
        chars=None,
        model=lm_shape(8192, 12, 768, 2304, 12, 4, 64, 4096),
        lm_steps=3000,
        lm_batch_size=32,
        lm_seq_len=512,
        lm_peak_lr=2e-3,
        answers=AnswerOptions(
            num_samples=8192, prompt_tokens=64, max_new_tokens=448, temperatures=(0.7,)
        ),
        num_prompts=40,
        temperature=0.7,
        sample_drafts=True,
        on_text=True,
        max_new_tokens=256,
        k=8,
        layers=4,
        aux_hidden_state_layers=(2, 8, 11),
        seq_len=512,
        hidden_states_dtype="bfloat16",
        stage_minutes=30,
        batch_size=16,
        steps=6000,
        peak_lr=2e-3,
        num_speed_prompts=12,
        repeats=5,
    ),
}
