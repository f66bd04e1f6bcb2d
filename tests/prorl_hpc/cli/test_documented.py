"""Every `prorl-hpc` command line of the documentation exists, with its options. Starts nothing."""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("singularity/*.md"),
     *ROOT.glob("slurm_templates/*.md")]
)  # fmt: skip
GENERAL = {"-h", "--help", "--version"}


def blocks(text: str) -> Iterator[str]:
    """Lines of fenced code, those that go on after a backslash as one."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()


def inline(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def commands(lines: Iterator[str] | list[str]) -> Iterator[list[str]]:
    """The words after `prorl-hpc`."""
    for line in lines:
        if "prorl-hpc " not in line:
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # text in a drawing
            continue
        if "prorl-hpc" in words:
            yield words[words.index("prorl-hpc") + 1 :]


def parser_of(name: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = importlib.import_module(
        f"prorl_hpc.cli.{COMMANDS[name][0]}"
    ).parser()
    return made


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= options_of(sub)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_whole_lines_are_understood(page: Path) -> None:
    for words in commands(blocks(page.read_text())):
        if any(word in ("...", "|", "&&") for word in words):
            continue
        parser = parser_of(words[0])
        nested = any(isinstance(a, argparse._SubParsersAction) for a in parser._actions)
        parse = parser.parse_args if nested else parser.parse_intermixed_args
        numbers = {"N": "3", "I": "0", "V": "1"}
        try:
            parse([numbers.get(word, word) for word in words[1:]])
        except SystemExit:
            pytest.fail(f"{page.name}: prorl-hpc {shlex.join(words)} isn't understood")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_in_passing_exists(page: Path) -> None:
    text = page.read_text()
    for words in [*commands(inline(text)), *commands(blocks(text))]:
        if words[0] in GENERAL or words[0] == "...":
            continue
        assert words[0] in COMMANDS, f"{page.name}: prorl-hpc {words[0]}"
        known = options_of(parser_of(words[0])) | GENERAL
        before = words[: words.index("--")] if "--" in words else words
        named = {word.strip("[],").partition("=")[0] for word in before if "--" in word[:3]}
        assert named <= known, f"{page.name}: {shlex.join(words)}: {sorted(named - known)}"
        if "--recipe-dir" not in words:
            recipes = {w.partition("=")[2] for w in words if w.startswith("recipe=")}
            shipped = {path.stem for path in (ROOT / "recipes/recipe").glob("*.yaml")}
            assert recipes <= shipped | {"R", "NAME"}, f"{page.name}: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Links to pages, and benchmarks, examples, tests and recipes by their paths."""
    text = page.read_text()
    linked = [page.parent / name for name in re.findall(r"\]\(([\w./-]+\.md)\)", text)]
    places = r"(?<![\w/])(?:benchmarks|examples|tests|recipes)/[\w./-]+\.(?:py|yaml|jsonl|txt)"
    named = [ROOT / name for name in re.findall(places, text)]
    assert [str(path) for path in (*linked, *named) if not path.exists()] == []
