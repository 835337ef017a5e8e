import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
