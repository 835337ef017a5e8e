"""Changes to a recipe on the command line: `peagle train recipe.yaml --optimizer.steps 100`."""

import dataclasses
import shlex
import types
import typing
from collections.abc import Sequence

import yaml

from peagle_jax.train.config import Run
from peagle_jax.train.settings import (
    build,
    example_of,
    field_types,
    former_values,
    list_example,
    new_names,
    options_of,
    shown,
    similar_key,
)
from peagle_jax.types import InputError

NULL = ("None", "none", "null")


def apply_overrides(run: Run, arguments: Sequence[str], where: str) -> Run:
    """The run with some of its settings replaced.

    Args:
      run: the run of a recipe.
      arguments: `--a.b.c VALUE` or `--a.b.c=VALUE`, where a.b.c is the path of a key in the recipe,
        in its present or a former spelling, with `-` or `_`. A list takes several values
        (`--head.aux_hidden_state_layers 2 5 7`), numbers also with commas between them, or YAML;
        one item of a list is named by its number (`--depth_schedule.0.until 100`). `None` stands
        for null.
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
        value = _present_value(run, keys)
        if value is None and types.NoneType not in options_of(hint):
            value = example_of(last, hint)
        example = _as_typed("--" + ".".join(keys), value)
        mapping[last] = _parse(hint, option, values, place, example)
        if keys == ["task"] and mapping[last] != run.task:
            rule = f"the recipe's task stays {run.task}: another one has other keys"
            next_step = f"make a recipe by peagle init-config --task {mapping[last]}"
            raise InputError(place, rule, mapping[last], next_step)
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
            # a former key whose values had other names as well is translated with its value
            known = field_types(hint) | former_values(hint)
            name = new_names(hint).get(part, part)
        if name not in known:
            parent = ".".join(keys) or "the recipe"
            rule = f"{option} names no key"
            if known:
                rule += f": those of {parent} are {', '.join(field_types(hint))}"
            else:
                rule += f": {parent} has a value, and no keys"
            next_step = f"remove {option}"
            if close := similar_key(part, known):
                next_step += f", or write --{'.'.join([*keys, close])}"
            raise InputError(place, rule, part, next_step)
        keys.append(name)
        hint = known[name]
    return keys, hint


def _present_value(run: Run, keys: Sequence[str]) -> typing.Any:
    """What the recipe has where `keys` lead; None where it has nothing."""
    value: typing.Any = run
    for key in keys:
        if isinstance(value, tuple):
            value = value[int(key)] if int(key) < len(value) else None
        elif value is not None:
            value = getattr(value, key, None)  # None for a former key
    return value


def _as_typed(option: str, value: typing.Any) -> str:
    """An option and a value as they are typed; of a section, or a list of them, the first key."""
    if dataclasses.is_dataclass(value):
        first = dataclasses.fields(value)[0].name
        return _as_typed(f"{option}.{first}", getattr(value, first))
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return _as_typed(f"{option}.0", value[0])
    items = value if isinstance(value, tuple) and value else [value]
    return " ".join([option, *(shlex.quote(str(shown(item))) for item in items)])


def _parse(hint: typing.Any, option: str, values: list[str], place: str, example: str) -> object:
    """The value of an option, as YAML would have given it.

    Args:
      example: an option and a value that work, for errors.
    """
    kinds = options_of(hint)
    item_types = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple]
    if not values:
        raise InputError(place, f"{option} needs a value", "none", f"write {example}")
    is_text = str in kinds
    if len(values) > 1 and not item_types:
        value = shlex.quote(" ".join(values)) if is_text else values[0]
        next_step = f"write {option} {value}"
        raise InputError(place, f"{option} takes one value", " ".join(values), next_step)
    if types.NoneType in kinds and values[0] in NULL:
        return None
    if is_text or any(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return values[0]
    if item_types and item_types[0] in (int, float):  # 2,5,7 is what many commands take
        values = [part.strip() for value in values for part in _split_numbers(value)]
        if "" in values:
            got = f"{option} {' '.join(values)}".rstrip()
            raise InputError(
                place, f"{option} needs a value in every place", got, f"write {example}"
            )
    try:
        parsed = [yaml.safe_load(value) for value in values]
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that is none; too deep a list
        rule = "the value of an override must be YAML"
        next_step = f"write {example}"
        if item_types:
            next_step = f"quote it for the shell: {option} '{list_example(item_types[0])}'"
        raise InputError(place, rule, f"{option} {' '.join(values)}", next_step) from None
    if item_types and not isinstance(parsed[0], list):
        return parsed
    return parsed[0]


def _split_numbers(value: str) -> list[str]:
    """The items of numbers with commas between them; YAML's own lists stay whole."""
    return [value] if value.lstrip().startswith("[") else value.split(",")
