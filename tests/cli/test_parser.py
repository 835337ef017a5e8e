"""The options: described with their defaults, and known by their former spellings."""

import argparse
import re
import shlex

import pytest

import peagle_jax
from peagle_jax.cli import COMMANDS, main
from peagle_jax.cli.commands import make_parser, parse_arguments
from peagle_jax.cli.parser import UsageError, default_text

# command: (what it needs, {former spelling: present spelling})
FORMER = {
    "train": ("CONFIG", {"--features DIR": "--hidden-states-dir DIR"}),
    "regenerate": (
        "--target T --out O",
        {
            "--source C": "--data C",
            "--answers 3": "--num-samples 3",
            "--new-tokens 4": "--max-new-tokens 4",
        },
    ),
    "extract": (
        "--target T --data C --out O",
        {
            "--taps 1,2": "--aux-hidden-state-layers 1,2",
            "--length 64": "--seq-len 64",
            "--batch 2": "--batch-size 2",
        },
    ),
    "generate": ("--target T --prompt P", {"--k 3": "-k 3", "--k=4": "-k 4"}),
    "bench": (
        "--target T --drafter H --out O",
        {"--k 1,3": "-k 1,3", "--concurrency 8": "--batch-size 8"},
    ),
    "convert": (
        "A B --to vllm",
        {"--k 3": "-k 3", "--tap-numbering output": "--aux-layer-numbering output"},
    ),
    "serve-config": ("A --engine vllm", {"--k 3": "-k 3"}),
    "calibrate": ("A B --target T --prompts P", {"--k 3": "-k 3"}),
    "plan": ("--target T", {"--heads 3": "--head-layers 3"}),
}


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command."""
    subparsers = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(subparsers[0].choices)


def flat(text: str) -> str:
    """Text without the line breaks that argparse puts in."""
    return " ".join(text.split())


PARSERS = command_parsers()
ARGUMENTS = [
    pytest.param(action, id=f"{name} {'/'.join(action.option_strings) or action.dest}")
    for name, parser in {"": make_parser(), **PARSERS}.items()
    for action in parser._actions
    if not isinstance(action, argparse._SubParsersAction)
]


@pytest.mark.parametrize("action", ARGUMENTS)
def test_every_argument_is_described_with_its_default(action):
    assert action.help and len(action.help) >= 8
    if action.required and action.option_strings:
        assert action.help.endswith("(required)")
    elif isinstance(action, argparse._StoreTrueAction):
        assert action.help.endswith("(default: off)")
    elif action.default not in (None, argparse.SUPPRESS):
        assert f"(default: {default_text(action.default)})" in action.help


def test_defaults_of_0_and_of_lists_are_shown():
    generate = flat(PARSERS["generate"].format_help())
    assert "0 is no filter (default: 0)" in generate and "(default: 1.0)" in generate
    assert "(default: 0.0 1.0)" in flat(PARSERS["regenerate"].format_help())


@pytest.mark.parametrize(
    "name, base, former, present",
    [
        (name, base, former, present)
        for name, (base, spellings) in FORMER.items()
        for former, present in spellings.items()
    ],
)
def test_former_spellings_are_parsed_and_not_listed(name, base, former, present):
    old = parse_arguments(shlex.split(f"{name} {base} {former}"))
    new = parse_arguments(shlex.split(f"{name} {base} {present}"))
    assert old.argv != new.argv
    assert vars(old) | {"argv": None} == vars(new) | {"argv": None}
    spelling = re.split("[ =]", former)[0]
    assert not re.search(rf"{spelling}\b(?!-)", PARSERS[name].format_help())


def test_all_former_spellings_are_tested():
    registered = {
        (name, spelling)
        for name, parser in PARSERS.items()
        for spelling, action in parser._option_string_actions.items()
        if spelling not in action.option_strings
    }
    tested = {
        (name, re.split("[ =]", former)[0])
        for name, (_, spellings) in FORMER.items()
        for former in spellings
    }
    assert registered == tested


@pytest.mark.parametrize("name", ["generate", "bench", "convert", "serve-config"])
def test_k_has_one_long_spelling(name):
    base = FORMER[name][0]
    spellings = ["-k 3", "-k3", "--num-speculative-tokens 3", "--num-speculative-tokens=3", "--k 3"]
    values = {parse_arguments(shlex.split(f"{name} {base} {words}")).k for words in spellings}
    assert values in ({3}, {"3"})


def test_messages_name_the_present_spelling():
    with pytest.raises(UsageError, match="extract: argument --batch-size: invalid int value"):
        parse_arguments("extract --target T --data C --out O --batch many".split())


def test_training_has_overrides_and_nothing_else_has():
    words = "train CONFIG --optimizer.steps 3 --features DIR --seed 4".split()
    arguments = parse_arguments(words)
    assert arguments.overrides == ["--optimizer.steps", "3", "--seed", "4"]
    assert arguments.hidden_states_dir == "DIR" and arguments.argv == words
    lists = "--head.aux_hidden_state_layers 2 5 7 --seed=4"
    for words in (f"train CONFIG {lists}", f"train {lists} CONFIG", f"train {lists} --x 3 CONFIG"):
        arguments = parse_arguments(words.split())
        expected = [word for word in words.split()[1:] if word != "CONFIG"]
        assert str(arguments.config) == "CONFIG" and arguments.overrides == expected
    arguments = parse_arguments("train --features DIR --seed 4 CONFIG".split())
    assert str(arguments.config) == "CONFIG" and arguments.hidden_states_dir == "DIR"
    assert arguments.overrides == ["--seed", "4"]
    with pytest.raises(UsageError, match="inspect: unknown argument --optimizer.steps 3"):
        parse_arguments("inspect DIR --optimizer.steps 3".split())


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_no_command_prints_the_help(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 0 and not err
    assert all(f"    {name} " in out or f"    {name}\n" in out for name in COMMANDS)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"peagle {peagle_jax.__version__}\n"
