"""Settings: frozen dataclasses that are read from YAML, JSON or the command line, strictly.

A key that is left out takes its default. An unknown key, a value of the wrong type and a value that
breaks a rule are errors that name the key. Former names of keys are understood (old_names.py).
"""

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Collection, Iterable, Mapping

from peagle_jax.old_names import RECIPE_KEYS, RECIPE_VALUES, with_new_names, with_new_values
from peagle_jax.types import InputError

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# values that work, for errors: of keys, and of other keys by their type
EXAMPLES = {
    "target": "peagle_jax/assets/target",
    "out": "runs/my_head",
    "source": "installed",
    "prompts": "prompts.jsonl",
    "init_from": "runs/other_head",
    "hidden_states_dir": "runs/hidden_states",
    "max_seconds": 3600,
    "vocab": 2048,
    "layers": 4,
    "dim": 256,
    "mlp_dim": 768,
    "heads": 4,
    "kv_heads": 2,
    "until": 100,
    "chat_template_kwargs": "{enable_thinking: false}",
    "num_depths": 1,
}
EXAMPLES_BY_TYPE = {int: 64, float: 0.5, bool: "true", str: "name"}
LIST_EXAMPLES_BY_TYPE = {int: "[2, 5, 7]", float: "[0.5, 1.0]", bool: "[true]", str: "[name]"}
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
}


class SettingError(ValueError):
    """A value that breaks a rule of its dataclass; `build` adds the file that it came from."""

    def __init__(self, key: str, rule: str, got: object, next_step: str) -> None:
        super().__init__(f"{key}: {rule}; got {got}; {next_step}")
        self.key, self.rule, self.got, self.next_step = key, rule, got, next_step


def check(holds: bool, key: str, rule: str, got: object, next_step: str) -> None:
    """Raises SettingError unless `holds`; for the `__post_init__` of settings.

    Args:
      holds: whether the rule holds.
      key: the setting, relative to its dataclass.
      rule: what must hold, for example "must be 1 or more".
      got: the value.
      next_step: what to do about it.
    """
    if not holds:
        raise SettingError(key, rule, got, next_step)


def build(
    cls: type,
    raw: object,
    where: str,
    path: str = "",
    default: typing.Any = None,
) -> typing.Any:
    """Makes a dataclass from a mapping.

    Args:
      cls: the dataclass.
      raw: the mapping, as it was read.
      where: the file that it was read from, for errors.
      path: the keys that lead to `raw` within the file, for errors: "head.rope".
      default: an instance whose values the keys left out take, before the defaults of `cls`.

    Raises:
      InputError: an unknown or missing key, a value of the wrong type, or one that breaks a rule.
    """
    place = _place(where, path)
    hints = field_types(cls)
    if not isinstance(raw, Mapping):
        next_step = f"give keys of {', '.join(hints)}"
        got = type(raw).__name__
        if raw is None:
            got, next_step = "null", f"{next_step}; leave it out for their defaults"
        raise InputError(place, "must be a mapping of keys", got, next_step)
    given = with_new_names(raw, new_names(cls), place)
    given = with_new_values(given, RECIPE_VALUES.get(cls.__name__, {}), place, None)
    if unknown := [str(key) for key in given if key not in hints]:
        rule = f"known keys are {', '.join(hints)}"
        got = f"unknown {', '.join(sorted(unknown))}"
        raise InputError(place, rule, got, _advice_on_unknown(sorted(unknown), hints))
    values, missing = {}, []
    for field in dataclasses.fields(cls):
        name = field.name
        value_of_default = _default_of(field, default)
        if name in given:
            hint, inner = hints[name], _join(path, name)
            values[name] = _value(hint, given[name], where, inner, value_of_default)
        elif value_of_default is not dataclasses.MISSING:
            values[name] = value_of_default
        else:
            missing.append(name)
    if missing:
        rule = f"{', '.join(missing)} must be given"
        lines = [f"{name}: {example_of(name, hints[name])}" for name in missing]
        pronoun = "it" if len(missing) == 1 else "them"
        next_step = f"add {pronoun}, for example {' and '.join(lines)}"
        raise InputError(place, rule, f"no {missing[0]}", next_step)
    try:
        return cls(**values)
    except SettingError as error:
        broken = _place(where, _join(path, error.key))
        raise InputError(broken, error.rule, error.got, error.next_step) from None


def field_types(cls: type) -> dict[str, typing.Any]:
    """Name -> type of the dataclass's fields, in their order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def new_names(cls: type) -> dict[str, str]:
    """Former -> present names of the dataclass's fields."""
    names: dict[str, str] = {}
    for owner in cls.__mro__:
        names |= RECIPE_KEYS.get(owner.__name__, {})
    return names


def former_values(cls: type) -> dict[str, type]:
    """Former keys of the dataclass whose values had other names as well, and their types."""
    former = RECIPE_VALUES.get(cls.__name__, {})
    return {old: type(next(iter(values))) for old, (_, values) in former.items()}


def options_of(hint: typing.Any) -> tuple[typing.Any, ...]:
    """The types that a value may have: `int | None` gives int and NoneType."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def similar_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` is probably a misspelling of; None if none is."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1)), None)


def example_of(key: str, hint: typing.Any) -> typing.Any:
    """A value that works, as YAML spells it, for errors.

    Args:
      key: the key's own name.
      hint: its type.
    """
    if key in EXAMPLES:
        return EXAMPLES[key]
    kind = next(option for option in options_of(hint) if option is not types.NoneType)
    if dataclasses.is_dataclass(kind):
        required = [
            f for f in dataclasses.fields(kind) if _default_of(f, None) is dataclasses.MISSING
        ]
        hints = field_types(typing.cast(type, kind))
        lines = [f"{field.name}: {example_of(field.name, hints[field.name])}" for field in required]
        return f"{{{', '.join(lines)}}}"
    if typing.get_origin(kind) is tuple:
        return list_example(typing.get_args(kind)[0])
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[0]
    return EXAMPLES_BY_TYPE[kind]


def list_example(hint: typing.Any) -> str:
    """A list that works as YAML, for errors.

    Args:
      hint: the type of its items.
    """
    if dataclasses.is_dataclass(hint):
        return f"[{example_of('', hint)}]"
    return LIST_EXAMPLES_BY_TYPE[hint]


def shown(value: typing.Any) -> typing.Any:
    """A value as YAML spells it."""
    value = plain(value)
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else value


def differences(
    old: typing.Any, new: typing.Any, path: str = "", may_change: Collection[str] = ()
) -> list[str]:
    """The keys in which two settings differ, each with both values.

    Args:
      may_change: keys, or beginnings of keys, that are left out.

    Returns:
      Lines such as "optimizer.steps 600, was 400"; empty if the settings are equal.
    """
    if path in may_change:
        return []
    if type(old) is not type(new) or not dataclasses.is_dataclass(old):
        return [] if old == new else [f"{path} {shown(new)}, was {shown(old)}"]
    lines = []
    for field in dataclasses.fields(old):
        pair = getattr(old, field.name), getattr(new, field.name)
        lines += differences(*pair, _join(path, field.name), may_change)
    return lines


def plain(settings: typing.Any) -> typing.Any:
    """Settings as the mappings, lists and numbers that YAML and JSON have."""
    if dataclasses.is_dataclass(settings):
        fields = dataclasses.fields(settings)
        return {field.name: plain(getattr(settings, field.name)) for field in fields}
    if isinstance(settings, tuple):
        return [plain(item) for item in settings]
    return settings


def _value(hint: typing.Any, raw: object, where: str, path: str, default: typing.Any) -> typing.Any:
    """`raw` as a value of the type `hint`."""
    options = options_of(hint)
    or_null = ", or null" if types.NoneType in options else ""
    if raw is None and types.NoneType in options:
        return None
    if isinstance(raw, int) and raw.bit_length() > 63:
        rule, got = "whole numbers must fit into 64 bits", f"one of {raw.bit_length():,} bits"
        raise InputError(_place(where, path), rule, got, "write a smaller number")
    hint = next(option for option in options if option is not types.NoneType)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        inner_default = default if isinstance(default, hint) else None
        return build(hint, raw, where, path, inner_default)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return _items(arguments[0], raw, where, path, default, or_null)
    if typing.get_origin(hint) is typing.Literal:
        if raw not in arguments:
            rule = f"must be one of {', '.join(map(str, arguments))}"
            raise InputError(_place(where, path), rule, _brief(raw), f"use {arguments[0]}")
        return raw
    if hint is float and isinstance(raw, str) and NUMBER.fullmatch(raw):
        raw = float(raw)  # YAML 1.1 reads 3e-3, which has no point, as text
    if hint is float and isinstance(raw, float) and not math.isfinite(raw):
        next_step = f"write a number such as {EXAMPLES_BY_TYPE[float]}{or_null}"
        raise InputError(_place(where, path), "must be a finite number", raw, next_step)
    is_bool = isinstance(raw, bool)
    accepted = (int, float) if hint is float else hint
    if not isinstance(raw, accepted) or is_bool != (hint is bool):
        rule = f"must be {TYPE_NAMES.get(hint, hint.__name__)}"
        key, bracket, _ = path.rpartition(".")[2].partition("[")
        if default is not dataclasses.MISSING and default is not None and not bracket:
            example = shown(default)
        else:
            example = list_example(hint) if bracket else example_of(key, hint)
        next_step = f"write {key}: {example}{or_null}"
        raise InputError(_place(where, path), rule, _brief(raw), next_step)
    return float(raw) if isinstance(raw, int | float) and hint is float else raw


def _items(
    hint: typing.Any,
    raw: object,
    where: str,
    path: str,
    default: typing.Any,
    or_null: str,
) -> tuple[typing.Any, ...]:
    """A tuple of values from a list; or from a mapping of numbers, which replaces single items.

    The latter is how the command line changes one item: `--depth_schedule.0.until 100`.
    """
    old = default if isinstance(default, tuple) else ()
    if isinstance(raw, Mapping) and raw and all(str(k) in map(str, range(len(old))) for k in raw):
        changed = {int(key): value for key, value in raw.items()}
        return tuple(
            _value(hint, changed[i], where, f"{path}[{i}]", item) if i in changed else item
            for i, item in enumerate(old)
        )
    if not isinstance(raw, list | tuple):
        rule = "must be a list" + (f", or one of its {len(old)} items by number" if old else "")
        example = shown(old) if old else list_example(hint)
        next_step = f"write {path.rpartition('.')[2]}: {example}{or_null}"
        raise InputError(_place(where, path), rule, _brief(raw), next_step)
    missing = dataclasses.MISSING
    return tuple(_value(hint, x, where, f"{path}[{i}]", missing) for i, x in enumerate(raw))


def _brief(raw: object) -> str:
    """A value as Python writes it, cut where it is long."""
    try:
        return reprlib.repr(raw)
    except ValueError:  # Python writes whole numbers of up to 4,300 digits
        return f"a {type(raw).__name__} with a number that is too long to be written"


def _advice_on_unknown(unknown: list[str], known: Iterable[str]) -> str:
    """What to do about keys that are not known: each is named, and what it may have meant."""
    close = {key: similar for key in unknown if (similar := similar_key(key, known))}
    renamings = [f", or rename {key} to {similar}" for key, similar in close.items()]
    return f"remove {', '.join(unknown)}{''.join(renamings)}"


def _default_of(field: dataclasses.Field, default: typing.Any) -> typing.Any:
    """What a field is where its key is left out; MISSING if it must be given."""
    if default is not None:
        return getattr(default, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _place(where: str, path: str) -> str:
    return f"{where}: {path}" if path else where
