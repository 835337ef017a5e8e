"""What others published, to be drawn beside our numbers.

Each has its source, and why it is not the same measurement as ours.
"""

import dataclasses

LARGE = (
    "a target of 20B to 120B parameters, its head trained for long; ours are smaller by orders of "
    "magnitude"
)
TOKENS = "tokens per target forward"
TIMES = "times as fast"
SHARE = "% of drafts accepted, by position"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One published number, or a row of them.

    Attributes:
      what: that was measured.
      values: one or more.
      unit: of the values.
      source: where they stand.
      differs: from what we measure: target, hardware, texts.
      at: position or K of each value; empty for a single number.
    """

    what: str
    values: tuple[float, ...]
    unit: str
    source: str
    differs: str
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.what}: needs a value; got none; name one or more")
        if self.at and len(self.at) != len(self.values):
            raise ValueError(
                f"{self.what}: needs one position or K for each value; got {self.at} for "
                f"{self.values}; give `at` and `values` equal lengths"
            )


HUMANEVAL = (
    "HumanEval on a GPU, where ours are pieces of the Python library; target and head of full size"
)

# Drawn beside ours: the same axis, "accepted at position i of all drafts", as vLLM counts it.
PEAGLE_POSITIONS = Published(
    what="P-EAGLE, K = 8",
    values=(63, 38, 23, 14, 9, 5, 3, 2),
    at=tuple(range(1, 9)),
    unit=SHARE,
    source="vLLM #32628",
    differs=HUMANEVAL,
)
EAGLE3_POSITIONS = Published(
    what="EAGLE-3, K = 8",
    values=(71, 49, 32, 21, 14, 9, 5, 3),
    at=tuple(range(1, 9)),
    unit=SHARE,
    source="vLLM #32628",
    differs=HUMANEVAL,
)
LENGTH_BY_K = Published(
    what="P-EAGLE for GPT-OSS-20B, acceptance length by K",
    values=(1.90, 2.68, 3.17, 3.62, 4.08),
    at=(1, 2, 3, 4, 7),
    unit=TOKENS,
    source="aws-neuron/nkipy",
    differs=f"AWS Trainium; {LARGE}",
)

# For the table only: nothing of ours is measured in their unit at their size.
CARD, AWS = "model card of amazon/gpt-oss-120b-p-eagle", "AWS blog"
B200 = f"one B200; {LARGE}"
NUMBERS = (
    PEAGLE_POSITIONS,
    EAGLE3_POSITIONS,
    LENGTH_BY_K,
    Published(
        what="P-EAGLE for Qwen3-8B, 5,000 ShareGPT samples, trained with 4 depths",
        values=(41, 11, 1.6, 0.15),
        at=(1, 2, 3, 4),
        unit=SHARE,
        source="speculators, examples/train (acceptance length 1.53)",
        differs="an 8B target; little training, as ours",
    ),
    Published(
        what="P-EAGLE for GPT-OSS-120B, K = 5, MT-Bench",
        values=(2.68,),
        unit=TOKENS,
        source=CARD,
        differs=LARGE,
    ),
    Published(what="the same, HumanEval", values=(3.15,), unit=TOKENS, source=CARD, differs=LARGE),
    Published(what="the same, GSM8K", values=(3.55,), unit=TOKENS, source=CARD, differs=LARGE),
    Published(
        what="P-EAGLE against EAGLE-3, best case",
        values=(1.69,),
        unit=TIMES,
        source=AWS,
        differs=B200,
    ),
    Published(
        what="P-EAGLE against EAGLE-3, lowest and highest of GPT-OSS 120B and 20B, Qwen3-Coder 30B",
        values=(1.10, 1.36),
        unit=TIMES,
        source="arXiv:2602.01469, abstract",
        differs=LARGE,
    ),
    Published(
        what="P-EAGLE against EAGLE-3, both K = 11, HumanEval, concurrency 1",
        values=(1.22,),
        unit=TIMES,
        source=AWS,
        differs=B200,
    ),
    Published(what="the same, concurrency 8", values=(1.12,), unit=TIMES, source=AWS, differs=B200),
    Published(
        what="P-EAGLE against EAGLE-3, both K = 11, SPEED-Bench, by concurrency",
        values=(1.41, 1.07, 1.02),
        at=(1, 32, 128),
        unit=TIMES,
        source=AWS,
        differs=B200,
    ),
    Published(
        what="Qwen3-Coder-30B-A3B, HumanEval, FP8: plain, EAGLE-3, P-EAGLE",
        values=(294, 955, 1167),
        unit="tokens/s",
        source=AWS,
        differs=B200,
    ),
    Published(
        what="the same, P-EAGLE against plain decoding, HumanEval",
        values=(3.97,),
        unit=TIMES,
        source=AWS,
        differs=B200,
    ),
    Published(what="the same, SPEED-Bench", values=(2.97,), unit=TIMES, source=AWS, differs=B200),
    Published(
        what="best K of P-EAGLE and of EAGLE-3",
        values=(7, 3),
        unit="tokens drafted in a step",
        source=AWS,
        differs=B200,
    ),
    Published(
        what="P-EAGLE's head, smallest and largest share",
        values=(2, 5),
        unit="% of the target's parameters",
        source=AWS,
        differs=LARGE,
    ),
    Published(
        what="longest training sequence",
        values=(20_000,),
        unit="tokens",
        source="AWS blog, arXiv:2602.01469",
        differs=LARGE,
    ),
    Published(
        what="GPT-OSS-120B, P-EAGLE: K = 7 at batch 1, K = 3 at batch 8",
        values=(561, 2389),
        unit="tokens/s",
        source="vLLM #32887",
        differs=B200,
    ),
    Published(
        what="P-EAGLE against plain decoding, best: HumanEval, concurrency 4",
        values=(4.17,),
        unit=TIMES,
        source=AWS,
        differs=B200,
    ),
    Published(
        what="P-EAGLE against plain decoding, GPT-OSS-120B, K = 7, batch 1",
        values=(1.52,),
        unit=TIMES,
        source="vLLM #32887",
        differs=B200,
    ),
)
