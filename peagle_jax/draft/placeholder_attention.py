"""What placeholders attend to, and what the layers of a head have of the committed tokens.

The paper's design is the first of each; the others are ablations, which vLLM cannot serve.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

ATTENTION_DESIGNS: dict[str, str] = {
    "causal": "the committed tokens, and the placeholders before it (the paper's and vLLM's)",
    "bidirectional": "the committed tokens, and all placeholders of its step",
    "committed": "the committed tokens, and no other placeholder",
}
# What the layers behind the first make keys and values of committed tokens of. The first layer
# reads embeddings and fused hidden states in any case. DFlash (speculators 0.9 trains it) injects
# keys and values, too, and otherwise: into all layers, of hidden states alone behind one norm, and
# not of the newest token, which stands in its block and has keys and values as placeholders have.
CONTEXT_DESIGNS: dict[str, str] = {
    "layers": "the outputs of the layer before (the paper's and vLLM's)",
    "injected": "the embeddings and the fused hidden states, each behind a norm of the layer's",
}


def attended(
    design: str, after_committed: Int[Array, "B T"], num_placeholders: int
) -> Bool[Array, "B T T"]:
    """Which rows of a decoding step see which, beside the tokens of earlier steps.

    Args:
      design: a name in `ATTENTION_DESIGNS`.
      after_committed: of each row; below 0 committed tokens, then from 0 the placeholders, and
        padding behind these.
      num_placeholders: of each sequence.

    Returns:
      Whether the first row sees the second.
    """
    row = jnp.arange(after_committed.shape[1])[None]
    causal = row[:, :, None] >= row[:, None]
    is_placeholder = (after_committed >= 0) & (after_committed < num_placeholders)
    both = is_placeholder[:, :, None] & is_placeholder[:, None]
    if design == "bidirectional":
        return causal | both
    if design == "committed":
        return jnp.where(both, row[:, :, None] == row[:, None], causal)
    return jnp.broadcast_to(causal, both.shape)
