"""Changes to a recipe on the command line: `peagle train recipe.yaml --optimizer.steps 100`."""

import dataclasses
import types
import typing
from collections.abc import Sequence

import yaml

from peagle_jax.train.config import Run
from peagle_jax.train.settings import build, field_types, new_names, options_of, similar_key
from peagle_jax.types import InputError

NULL = ("None", "none", "null")


def apply_overrides(run: Run, arguments: Sequence[str], where: str) -> Run:
    """The run with some of its settings replaced.

    Args:
      run: the run of a recipe.
      arguments: `--a.b.c VALUE` or `--a.b.c=VALUE`, where a.b.c is the path of a key in the recipe,
        in its present or a former spelling, with `-` or `_`. A list takes several values
        (`--head.aux_hidden_state_layers 2 5 7`) or YAML; one item of a list is named by its number
        (`--depth_schedule.0.until 100`). `None` stands for null.
      where: the recipe's file, for errors.

    Returns:
      A run of the same kind. All rules are checked, also those between settings.

    Raises:
      InputError: an argument names no key of the run, has no value or one of the wrong type, or the
        settings do not go together; the message gives the rule that is broken.
    """
    if not arguments:
        return run
    place = f"{where} with {' '.join(arguments)}"
    changes: dict = {}
    for option, values in _options(arguments, place):
        keys, hint = _find(type(run), option, place)
        *parents, last = keys
        mapping = changes
        for parent in parents:
            if not isinstance(mapping.get(parent), dict):
                mapping[parent] = {}
            mapping = mapping[parent]
        mapping[last] = _parse(hint, option, values, place)
    return build(type(run), changes, place, default=run)


def _options(arguments: Sequence[str], place: str) -> list[tuple[str, list[str]]]:
    """Every option with the values behind it."""
    options: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(argument)
        else:
            rule = "overrides begin with the name of a key"
            raise InputError(place, rule, argument, "write them as --optimizer.steps 100")
    return options


def _find(cls: type, option: str, place: str) -> tuple[list[str], typing.Any]:
    """The present names of the keys that an option leads through, and the type of its value."""
    keys: list[str] = []
    hint: typing.Any = cls
    for part in option.removeprefix("--").replace("-", "_").split("."):
        hint = next(kind for kind in options_of(hint) if kind is not types.NoneType)
        if typing.get_origin(hint) is tuple and part.isdigit():
            hint = typing.get_args(hint)[0]
            keys.append(part)
            continue
        known, name = {}, part
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            known = field_types(hint)
            name = new_names(hint).get(part, part)
        if name not in known:
            parent = ".".join(keys) or "the recipe"
            rule = f"{option} names no key"
            if known:
                rule += f": those of {parent} are {', '.join(known)}"
            else:
                rule += f": {parent} has a value, and no keys"
            raise InputError(place, rule, part, f"remove it{similar_key(part, known)}")
        keys.append(name)
        hint = known[name]
    return keys, hint


def _parse(hint: typing.Any, option: str, values: list[str], place: str) -> object:
    """The value of an option, as YAML would have given it."""
    kinds = options_of(hint)
    is_list = any(typing.get_origin(kind) is tuple for kind in kinds)
    if not values or (len(values) > 1 and not is_list):
        got = f"{option} with {' '.join(values) or 'none'}"
        raise InputError(place, "each override takes one value", got, f"write {option} VALUE")
    if types.NoneType in kinds and values[0] in NULL:
        return None
    if any(kind is str or typing.get_origin(kind) is typing.Literal for kind in kinds):
        return values[0]
    try:
        parsed = [yaml.safe_load(value) for value in values]
    except yaml.YAMLError:
        rule = "the value of an override must be YAML"
        raise InputError(place, rule, f"{option} {' '.join(values)}", "check its quotes") from None
    if is_list and not isinstance(parsed[0], list):
        return parsed
    return parsed[0]
