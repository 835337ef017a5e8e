"""What a head's run does not train, over its sessions: it is in no checkpoint, but in `frozen`."""

from pathlib import Path

import numpy as np

from peagle_jax.checkpoints import checksums
from peagle_jax.checkpoints.orbax_io import open_tree
from peagle_jax.checkpoints.runs import FROZEN
from peagle_jax.old_names import TRAINING_STATE_KEYS
from peagle_jax.train.config import HeadRun, PeagleRun
from peagle_jax.train.mesh import put, to_host
from peagle_jax.train.run_folder import has_checkpoints
from peagle_jax.types import InputError, Params
from peagle_jax.weights import flatten_params, unflatten_params


def kept_frozen(run: HeadRun) -> dict[str, np.ndarray] | None:
    """By path, what an earlier session did not train; None where there is none.

    Raises:
      InputError: it is damaged.
    """
    folder = Path(run.out) / FROZEN
    if not has_checkpoints(run):
        return None
    if not folder.exists():
        alone = isinstance(run, PeagleRun) and run.trained_alone
        trains_all = run.train_embedding and run.train_lm_head and run.head.draft_vocab is None
        return {} if trains_all and not alone else None
    try:
        return {_new_name(path): np.asarray(x) for path, x in open_tree(folder).items()}
    except InputError:
        if (folder / checksums.FILE).exists():
            raise  # other values would change what the checkpoints' parameters mean
        return None  # it was being written when the process was killed, and is written anew


def _new_name(path: str) -> str:
    """A dotted path under today's name of its first part."""
    first, dot, rest = path.partition(".")
    return TRAINING_STATE_KEYS.get(first, first) + dot + rest


def in_place_of(run: HeadRun, frozen: Params, kept: dict[str, np.ndarray]) -> Params:
    """The frozen parameters of an earlier session, in the places of today's.

    What they came from, the target or the head of `init_from`, may have been trained since. The
    draft vocabulary is made of the corpus, and the rows of lm_head in the checkpoint are of its
    tokens: where data.json is lost, nothing else would notice that the corpus has changed.

    Raises:
      InputError: they are of another head, or of another draft vocabulary.
    """
    flat = dict(flatten_params(frozen))
    next_step = f"restore {Path(run.out) / FROZEN} from a backup, or set out to another folder"
    if {path: x.shape for path, x in flat.items()} != {p: x.shape for p, x in kept.items()}:
        rule = "a run is resumed only with the frozen parameters that it began with"
        differing = min(flat.keys() ^ kept.keys(), default="a shape")
        raise InputError(run.out, rule, f"a difference at {differing}", next_step)
    is_chosen = run.init_from is None  # and not that of a trained head
    if is_chosen and "d2t" in flat and not np.array_equal(kept["d2t"], to_host(flat["d2t"])):
        rule = "a run is resumed only with the draft vocabulary that it began with"
        next_step = f"restore {run.data.source}, or set out to another folder"
        raise InputError(run.out, rule, "that of another corpus", next_step)
    put_back = {path: put(kept[path].astype(x.dtype), x.sharding) for path, x in flat.items()}
    return unflatten_params(put_back)
