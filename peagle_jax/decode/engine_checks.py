"""Checks of what an engine is asked for, before anything is computed; and of what failed."""

import numbers
from collections.abc import Mapping
from typing import Any

import jax

from peagle_jax.decode.confidence import check_calibrated
from peagle_jax.decode.drafters import METHODS, Drafter, ParallelDrafter, synthetic_rates
from peagle_jax.decode.tree import MAX_WIDTH, num_paths
from peagle_jax.free_memory import is_out_of_memory
from peagle_jax.types import InputError

MAX_TREE_NODES = 256
# Of all paths that may be among the likeliest the scores are computed in every step, unless tokens
# are conditioned on their parents. With K = 7 there are 62,000 that may be among the 256 likeliest,
# with K = 15 more than a million.
MAX_TREE_PATHS = 100_000
# Options that are numbers of 1 or more, and what errors suggest.
EXAMPLES = {"max_batch": 8, "prefill_chunk": 512, "max_steps": 8, "num_tree_nodes": 32}


def check_options(drafter: Drafter | None, options: Mapping[str, Any]) -> None:
    """Raises InputError where options of `Engine` cannot be."""
    for name, example in EXAMPLES.items():
        check_at_least_1(name, options.get(name), example)
    check_drafter(drafter, options.get("num_tree_nodes"), options.get("adaptive_k", False))


def check_drafter(drafter: Drafter | None, num_tree_nodes: int | None, adaptive_k: bool) -> None:
    """Raises InputError where a drafter cannot do what is asked for."""
    check_num_nodes(num_tree_nodes)
    got = type(drafter).__name__ if drafter else "plain decoding"
    if num_tree_nodes is not None and not isinstance(drafter, ParallelDrafter):
        rule = "trees are made of what a P-EAGLE head drafts in parallel"
        next_step = "use a P-EAGLE head, or leave out num_tree_nodes for a chain"
        raise InputError("num_tree_nodes", rule, got, next_step)
    if num_tree_nodes is not None and isinstance(drafter, ParallelDrafter):
        check_is_not_wider(drafter.k, num_tree_nodes, drafter.config.draft_vocab)
        if drafter.config.markov_rank is None:
            check_num_paths(drafter.k, num_tree_nodes)
    if num_tree_nodes is not None and synthetic_rates(drafter) is not None:
        rule, next_step = "drafts at given rates are a chain", "leave out one of the two"
        raise InputError("num_tree_nodes", rule, "a drafter with synthetic_rates", next_step)
    if adaptive_k and not isinstance(drafter, tuple(METHODS.values())):
        next_step = "give a draft head, or leave out adaptive_k"
        raise InputError("adaptive_k", "K is chosen for a draft head", got, next_step)
    if adaptive_k and num_tree_nodes is not None:
        rule, next_step = "K is chosen for chains of drafts", "leave out one of the two"
        raise InputError("adaptive_k", rule, f"a tree of {num_tree_nodes} nodes", next_step)
    if adaptive_k:
        check_calibrated(drafter)
    if adaptive_k and jax.process_count() > 1:
        # each would choose by times of its own
        rule, next_step = "K is chosen by one process", "give a number of drafts"
        raise InputError("adaptive_k", rule, f"{jax.process_count()} processes", next_step)


def check_num_nodes(num_tree_nodes: int | None) -> None:
    """Raises InputError where a tree has too many nodes."""
    if num_tree_nodes is not None and num_tree_nodes > MAX_TREE_NODES:
        rule = f"at most {MAX_TREE_NODES} drafts in a tree, as its paths are too many beyond"
        raise InputError("num_tree_nodes", rule, num_tree_nodes, "use 32")


def check_is_not_wider(k: int, num_tree_nodes: int, draft_vocab: int) -> None:
    """Raises InputError where there are not as many nodes as a tree is to have.

    A node has at most MAX_WIDTH continuations, or as many as the draft vocabulary has tokens.
    """
    width, num_nodes = min(draft_vocab, MAX_WIDTH), 0
    for depth in range(1, k + 1):
        num_nodes += width**depth
        if num_nodes >= num_tree_nodes:
            return
    rule = f"with K = {k} and {width} continuations of a draft there are {num_nodes:,} nodes"
    raise InputError("num_tree_nodes", rule, num_tree_nodes, f"use at most {num_nodes:,}")


def check_num_paths(k: int, num_tree_nodes: int) -> None:
    """Raises InputError where too many paths of K tokens may be among the likeliest."""
    if (paths := num_paths(k, num_tree_nodes)) > MAX_TREE_PATHS:
        rule = f"at most {MAX_TREE_PATHS:,} paths may be among the likeliest of a tree"
        got = f"{paths:,} with {num_tree_nodes} nodes and K = {k}"
        raise InputError("num_tree_nodes", rule, got, "use 32, or a lower K")


def check_at_least_1(name: str, value: Any, example: int) -> None:
    """Raises InputError where an option is given and is no whole number of 1 or more."""
    if value is not None and not isinstance(value, numbers.Integral):
        next_step = f"leave out {name}, or use {example}"
        raise InputError(name, "must be a whole number", repr(value), next_step)
    if value is not None and value < 1:
        raise InputError(name, "must be 1 or more", value, f"leave out {name}, or use {example}")


def can_go_on(error: BaseException) -> bool:
    """Whether it is a lack of memory; of several processes one cannot go on without the others."""
    return is_out_of_memory(error) and jax.process_count() == 1
