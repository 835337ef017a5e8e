"""How large everything is: a target trained here, its text, and the head that every experiment starts from."""

import dataclasses

from peagle_jax.pipelines.budgets import lm_shape
from peagle_jax.train.config import LmShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """Text that a head learns from: the target's own continuations of excerpts; no temperatures: the corpus itself."""

    count: int
    prompt_tokens: int
    new_tokens: int
    temperatures: tuple[float, ...]  # every batch of answers takes the next one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    minutes: float  # of one run of the base, where it was measured
    where: str
    chars: int | None  # of each kind of text; None: all
    model: LmShape
    lm_steps: int
    lm_rows: int
    lm_length: int
    lm_rate: float
    answers: Answers
    prompts: int  # of each kind of text
    new_tokens: int
    k: int  # depths in training, and tokens drafted
    layers: int
    aux_hidden_state_layers: tuple[int, ...]
    length: int  # tokens a row
    stored: str  # dtype of the hidden states on disk
    stage_minutes: float  # of everything that runs share, once
    rows: int  # a step
    steps: int
    rate: float
    speed_prompts: int  # decoded one at a time, for tokens a second
    repeats: int


BUDGETS = {
    "smoke": Budget(
        minutes=0.5,
        where="2 CPU cores",
        chars=60_000,
        model=lm_shape(512, 4, 64, 160, 4, 2, 16, 512),
        lm_steps=60,
        lm_rows=4,
        lm_length=128,
        lm_rate=4e-3,
        answers=Answers(count=96, prompt_tokens=16, new_tokens=48, temperatures=(0.0,)),
        prompts=2,
        new_tokens=16,
        k=3,
        layers=1,
        aux_hidden_state_layers=(1, 2, 3),
        length=64,
        stored="float32",
        stage_minutes=1,
        rows=2,
        steps=16,
        rate=3e-3,
        speed_prompts=1,
        repeats=1,
    ),
    "small": Budget(
        minutes=4,
        where="one core of an AMD EPYC",
        chars=1_700_000,
        model=lm_shape(1024, 6, 128, 384, 4, 2, 32, 1024),
        lm_steps=2400,
        lm_rows=8,
        lm_length=256,
        lm_rate=4e-3,
        answers=Answers(count=4096, prompt_tokens=32, new_tokens=96, temperatures=(0.0,)),
        prompts=40,
        new_tokens=64,
        k=5,
        layers=2,
        aux_hidden_state_layers=(1, 4, 5),
        length=128,
        stored="float32",
        stage_minutes=20,
        rows=2,
        steps=2400,
        rate=3e-3,
        speed_prompts=6,
        repeats=3,
    ),
    "full": Budget(
        minutes=20,
        where="one H200? never run",
        chars=None,
        model=lm_shape(8192, 12, 768, 2304, 12, 4, 64, 4096),
        lm_steps=3000,
        lm_rows=32,
        lm_length=512,
        lm_rate=2e-3,
        answers=Answers(count=8192, prompt_tokens=64, new_tokens=448, temperatures=(0.0,)),
        prompts=32,
        new_tokens=256,
        k=8,
        layers=4,
        aux_hidden_state_layers=(2, 8, 11),
        length=512,
        stored="bfloat16",
        stage_minutes=30,
        rows=16,
        steps=6000,
        rate=2e-3,
        speed_prompts=12,
        repeats=5,
    ),
}
