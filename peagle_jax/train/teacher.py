"""What a parallel head learns from, and its loss with that of Markov and confidence heads."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle_jax.draft.head import DraftHead
from peagle_jax.train.loss import DepthCounts, MarkovBias, distill


def teacher_columns(head: DraftHead, lm_head_weight: Float[Array, "E V"]) -> Float[Array, "E W"]:
    """The target's output matrix, its columns restricted to the head's draft vocabulary."""
    return lm_head_weight if head.d2t is None else lm_head_weight[:, head.target_ids()]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """What a head learns from: the target's hidden states and output matrix, and the loss.

    Attributes:
      columns: of the output matrix, restricted to the draft vocabulary.
      hidden: final hidden states, one for each shifted position.
      tokens: of the shifted rows. That of a position is the one before what is predicted there,
        which Markov and confidence heads read: the true one, whatever would have been drafted.
    """

    columns: Float[Array, "E W"]
    hidden: Float[Array, "B n E"]
    tokens: Int[Array, "B n"]
    num_depths: int
    logit_cap: float | None
    loss: str

    def distill(
        self,
        head: DraftHead,
        hidden: Float[Array, "B P D"],
        positions: Int[Array, "B P"],
        weight: Float[Array, "B P"],
        depth: Int[Array, "B P"],
        after_depth0: Float[Array, "B n S"] | None = None,
        are_depth0: bool = False,
    ) -> tuple[Float[Array, ""], DepthCounts, Float[Array, "B P S"] | None]:
        """As `loss.distill`, of rows that learn from their positions.

        Args:
          after_depth0: the states of a Markov head after the rows of depth 0, where these are not
            among the rows.
          are_depth0: whether all rows are of depth 0, so that no states have to be followed.

        Returns:
          The sum of losses, counts, and the states of a Markov head after the rows of depth 0; None
          without.
        """
        B, n = self.hidden.shape[:2]
        teacher_row = positions + n * jnp.arange(B)[:, None]
        bias = confidence = states = None
        previous = jnp.take_along_axis(self.tokens, positions, axis=1)
        normed = head.final_norm(hidden)
        if head.confidence is not None:
            confidence = _flatten_rows(head.confidence_logits(normed, previous))
        if head.markov is not None:
            code, states = head.markov.codes(
                previous,
                normed,
                positions - depth,
                depth,
                num_anchors=n,
                num_depths=1 if are_depth0 else self.num_depths,
                after_first=after_depth0,
            )
            bias = MarkovBias(head.markov, _flatten_rows(code))
        total, counts = distill(
            head.final_norm,
            head.lm_head.kernel[...],
            _flatten_rows(hidden),
            self.columns,
            _flatten_rows(self.hidden),
            _flatten_rows(teacher_row),
            _flatten_rows(weight),
            _flatten_rows(depth),
            self.num_depths,
            self.logit_cap,
            self.loss,
            bias,
            confidence,
            B,
        )
        return total, counts, states


def _flatten_rows(x: Array) -> Array:
    """[B P ..] -> [B*P ..]."""
    return x.reshape(-1, *x.shape[2:])
