"""Stages of the cache: each is made once, and found again by its configuration and code."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.code_keys import code_key
from peagle_jax.atomic_write import write_atomically
from peagle_jax.types import InputError

DONE = "stage.json"  # the file of a stage that is complete
# No stage has a head: a new design of the placeholder makes none of them anew.
WITHOUT = ("peagle_jax.draft",)
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One folder of the cache.

    Attributes:
      name: what the folder's name begins with.
      config: everything that decides what comes out, as JSON.
      modules: where the code begins that makes it (experiments/code_keys.py follows their imports).
      parents: the stages that it is made from.
      num_bytes: about what it takes on disk.
      make: called with its own folder, its parents' folders, and what prints a line.
    """

    name: str
    config: dict
    modules: tuple[str, ...]
    parents: tuple["Stage", ...]
    num_bytes: int
    make: Callable[[Path, Sequence[Path], Log], None]

    @property
    def key(self) -> str:
        facts = [
            self.name,
            self.config,
            code_key(self.modules, WITHOUT),
            [parent.key for parent in self.parents],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def folder(self, cache: Path) -> Path:
        return cache / f"{self.name}-{self.key}"

    def with_parents(self) -> list["Stage"]:
        """All stages that it is made from, each once and before what needs it, and itself last."""
        stages: dict[str, Stage] = {}
        for parent in self.parents:
            for stage in parent.with_parents():
                stages.setdefault(stage.key, stage)
        return [*stages.values(), self]


def missing_stages(stages: Sequence[Stage], cache: Path) -> list[Stage]:
    """The stages, and stages behind them, that have to be made, in order."""
    missing: dict[str, Stage] = {}
    for stage in stages:
        for needed in stage.with_parents():
            if not (needed.folder(cache) / DONE).exists():
                missing[needed.key] = needed
    return list(missing.values())


def prepare(stages: Sequence[Stage], cache: Path, log: Log = print) -> None:
    """Makes what is missing.

    A stage that was cut short continues where it stopped. One whose code, configuration or parents
    changed is made anew, and the folder of before stays.

    Raises:
      InputError: the disk has too little room for what is to be made.
    """
    missing = missing_stages(stages, cache)
    check_disk_space(missing, cache)
    # several stages of one name, for example prompts of two lengths, do not replace each other
    wanted = {needed.folder(cache).name for one in stages for needed in one.with_parents()}
    for stage in missing:
        folder = stage.folder(cache)
        if outdated := _outdated(stage, cache, wanted):
            verb = "is" if len(outdated) == 1 else "are"
            names = ", ".join(outdated)
            log(f"{stage.name}: {names} {verb} of other settings, parents or code; making it anew")
        log(f"{folder.name}: making it")
        folder.mkdir(parents=True, exist_ok=True)
        stage.make(folder, [parent.folder(cache) for parent in stage.parents], log)
        facts = {
            "name": stage.name,
            "config": stage.config,
            "code": code_key(stage.modules, WITHOUT),
            "parents": [parent.key for parent in stage.parents],
        }
        write_atomically(folder / DONE, json.dumps(facts, indent=2) + "\n")


def _outdated(stage: Stage, cache: Path, wanted: set[str]) -> list[str]:
    """Names of complete folders of the same stage that nobody asks for any more."""
    folders = sorted(cache.glob(f"{stage.name}-*"))
    return [f.name for f in folders if f.name not in wanted and (f / DONE).exists()]


def check_disk_space(stages: Sequence[Stage], cache: Path, head_bytes: int = 0) -> None:
    """Refuses what the disk has no room for.

    Args:
      stages: what is to be made.
      cache: where; the folder need not exist yet.
      head_bytes: about what the heads will take that are trained afterwards.

    Raises:
      InputError: there is too little room.
    """
    parts = [*((stage.name, stage.num_bytes) for stage in stages), ("heads", head_bytes)]
    needed = sum(size for _, size in parts)
    existing = next(p for p in (cache.absolute(), *cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        names = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size)
        raise InputError(
            cache,
            rule=f"what is to be cached takes {needed / 1e9:.1f} GB ({names})",
            got=f"{free / 1e9:.1f} GB free",
            next_step="free some space, or name a folder on another disk with --cache",
        )
