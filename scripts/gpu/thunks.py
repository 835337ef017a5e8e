"""What an XLA program for a GPU does, thunk by thunk, and which of it CUDA graphs hold.

A thunk is a kernel, a copy, a call or a loop. XLA makes one CUDA graph of a command buffer, which
the host then launches at once.
"""

import dataclasses
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

THUNK = re.compile(r"^( *)\d+: k(\w+)")


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One of a program.

    Attributes:
      kind: XLA's name of it, as `CustomKernel` or `While`.
      depth: spaces before it in XLA's listing; what stands within a thunk is deeper.
      graph: the number of the command buffer that holds it, from 0 on; None outside of all.
      in_loop: whether it is a part of a loop, and runs once a round.
    """

    kind: str
    depth: int
    graph: int | None
    in_loop: bool


def compile_program(
    lowered: Any, options: Mapping[str, str] | None = None
) -> tuple[Any, list[Thunk]]:
    """Compiles a `jax.stages.Lowered` for a GPU.

    Args:
      options: of XLA's compiler.

    Returns:
      The compiled program, and its thunks in order, without the command buffers themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **(options or {})})
        # the second listing is there only where a pass changed the first
        listings = [
            *Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"),
            *Path(folder).glob("*thunk_sequence.txt"),
        ]
        return compiled, read(listings[0].read_text(encoding="utf-8"))


def read(listing: str) -> list[Thunk]:
    """The thunks of XLA's listing.

    Lines of one level are indented alike, and a command buffer's are deeper than its own.
    """
    thunks: list[Thunk] = []
    graph, inside, graph_depth = -1, False, 0
    loops: list[int] = []  # depths of the loops around a line
    for line in listing.splitlines():
        if not (found := THUNK.match(line)):
            continue
        depth, kind = len(found[1]), found[2]
        if inside and depth <= graph_depth:
            inside = False
        while loops and depth <= loops[-1]:
            loops.pop()
        if kind == "CommandBuffer":
            graph, inside, graph_depth = graph + 1, True, depth
        else:
            thunks.append(Thunk(kind, depth, graph if inside else None, bool(loops)))
            if kind == "While":
                loops.append(depth)
    return thunks
