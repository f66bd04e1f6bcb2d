"""Hydra overrides to a checked Recipe. The only module that imports Hydra; starts nothing.

Config groups are directories of YAML files: those of `--recipe-dir` first, then the packaged ones.
An override `group=option` chooses a file, any other `a.b=value` sets one value of the schema.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from hpc.files import asset_directory
from prorl_hpc.recipe import Recipe, RecipeError, check, site_of
from prorl_hpc.schema import check_key, check_keys

GROUPS = ("recipe", "suite", "site", "algorithm", "model", "task")
SCHEMA = "prorl_schema"
ROOT = "prorl_root"
STARTS = {"recipe": "config.yaml", "suite": "evaluation.yaml"}
"""The group that must be chosen, and the file that a composition starts from."""


def compose(overrides: Sequence[str], *, recipe_dir: Path | None = None) -> Recipe:
    """The recipe that `overrides` choose; raises RecipeError with one readable line."""
    return _checked(compose_data(overrides, recipe_dir=recipe_dir))


def compose_suite(overrides: Sequence[str], *, recipe_dir: Path | None = None) -> Recipe:
    """What `suite=NAME` and further overrides choose to evaluate; raises RecipeError.

    Its tasks are checked as those of a recipe are; what is said of training are defaults.
    """
    return _checked(compose_data(overrides, recipe_dir=recipe_dir, start="suite"))


def _checked(data: dict[str, Any]) -> Recipe:
    try:
        recipe = msgspec.convert(data, Recipe, strict=False)
    except msgspec.ValidationError as err:
        raise RecipeError(f"recipe: {err}") from err
    check_keys("site", recipe.site)
    site_of(recipe)
    return check(recipe)


def options(group: str, *, recipe_dir: Path | None = None) -> dict[str, Path]:
    """Names that a group offers, each with its file."""
    found: dict[str, Path] = {}
    for root in reversed(_roots(recipe_dir)):
        directory = root / group
        for path in sorted(directory.rglob("*.yaml")):
            found[path.relative_to(directory).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def compose_data(
    overrides: Sequence[str], *, recipe_dir: Path | None = None, start: str = "recipe"
) -> dict[str, Any]:
    """The composed values as plain data, checked against the schema's types.

    `start`: one of STARTS.
    """
    parsed = [_parse(text) for text in overrides]
    choices = [p for p in parsed if p.key_or_group in GROUPS]
    _check_choices(choices, recipe_dir, start=start)
    passed, late = _translate(parsed)
    try:
        config = _compose(passed, recipe_dir, start=start)
        for key, value in late:
            with open_dict(config.tasks):
                config.tasks = OmegaConf.merge(config.tasks, _nested(key, value)["tasks"])
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    except MissingMandatoryValue as err:
        key = _full_key(str(err)) or str(err).rsplit(" ", 1)[-1]
        raise RecipeError(_valueless(key, config)) from err
    except (HydraException, OmegaConfBaseException) as err:
        raise _readable(err) from err
    except yaml.YAMLError as err:
        place = " ".join(str(err).split())
        raise RecipeError(f"a recipe file isn't YAML: {place}; correct it") from err
    except (OSError, UnicodeDecodeError) as err:
        raise RecipeError(f"a recipe file can't be read: {err}") from err
    assert isinstance(data, dict)
    _name_site(data.get("site"), parsed)
    return {str(key): value for key, value in data.items()}


def _valueless(key: str, config: DictConfig) -> str:
    advice = f"{key} has no value; add {key}=... or set it in the recipe"
    words = key.split(".")
    if words[0] != "tasks" or words[2:] != ["kind"]:
        return advice
    others = [str(n) for n in config.tasks if not OmegaConf.is_missing(config.tasks[n], "kind")]
    return f"{advice}; its tasks are called {', '.join(others)}" if others else advice


def _name_site(site: object, parsed: Sequence[Override]) -> None:
    """A site is called as its file: the `name` in one that was copied is that of another."""
    chosen = {choice.key_or_group: choice.value() for choice in parsed}
    if isinstance(site, dict) and "site.name" not in chosen and isinstance(chosen.get("site"), str):
        site["name"] = chosen["site"]


def _roots(recipe_dir: Path | None) -> list[Path]:
    packaged = asset_directory("recipes")
    if recipe_dir is None:
        return [packaged]
    if not recipe_dir.is_dir():
        raise RecipeError(f"--recipe-dir {str(recipe_dir)!r} isn't a directory")
    return [recipe_dir.resolve(), packaged]


def _parse(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise RecipeError(f"override {text!r} has no '='; write key=value{_example(text)}")
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as err:
        reason = str(err).splitlines()[0]
        raise RecipeError(f"override {text!r}: {reason}; quote the value: 'key=\"...\"'") from err
    if parsed.is_sweep_override():
        raise RecipeError(f"override {text!r} holds several values; for a list write key=[a,b]")
    return parsed


def _example(word: str) -> str:
    """What a lone word may have meant: an option of a group, or a key without its value."""
    for group in GROUPS:
        if word in options(group):
            return f", e.g. {group}={word}"
    try:
        check_key(word)
    except RecipeError:
        return ", e.g. recipe=logic"
    return f", e.g. {word}=..."


def _check_choices(choices: Sequence[Override], recipe_dir: Path | None, *, start: str) -> None:
    named = {choice.key_or_group for choice in choices}
    if start not in named:
        known = ", ".join(options(start, recipe_dir=recipe_dir))
        raise RecipeError(f"no {start} is chosen; add {start}=NAME, one of {known}")
    if other := named & STARTS.keys() - {start}:
        advice = "a suite is for prorl-hpc eval" if start == "recipe" else "give one of them"
        raise RecipeError(f"{other.pop()}=... doesn't go with {start}=...; {advice}")
    for choice in choices:
        if choice.is_delete():
            raise RecipeError(f"group {choice.key_or_group!r} can't be deleted; choose an option")
        value = choice.value()
        for name in value if isinstance(value, list) else [value]:
            _check_choice(choice.key_or_group, str(name), recipe_dir)


def _check_choice(group: str, name: str, recipe_dir: Path | None) -> None:
    known = options(group, recipe_dir=recipe_dir)
    if name in known:
        return
    if recipe_dir is not None and (recipe_dir / f"{name}.yaml").is_file():
        raise RecipeError(
            f"{group}={name}: {recipe_dir / name}.yaml lies beside the groups; "
            f"move it to {recipe_dir / group / name}.yaml"
        )
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {group}={close[0]}? " if close else ""
    raise RecipeError(f"{group}={name} is unknown; {hint}choose one of {', '.join(known)}")


def _translate(parsed: Sequence[Override]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Overrides for Hydra, and those below `tasks`, which may name tasks that no file has."""
    passed: list[str] = []
    late: list[tuple[str, Any]] = []
    for override in parsed:
        key, text = override.key_or_group, override.input_line or ""
        if key in GROUPS or override.is_delete():
            if key not in GROUPS:
                check_key(key)
            passed.append(text)
            continue
        if override.package is not None:
            raise RecipeError(f"override {text!r}: '@' isn't used here; write key=value")
        check_key(key)
        if key.startswith("tasks."):
            late.append((key, override.value()))
        else:
            passed.append("++" + text.lstrip("+"))
    return passed, late


def _compose(overrides: Sequence[str], recipe_dir: Path | None, *, start: str) -> DictConfig:
    # The root is stored, not read from the search path: Hydra wants it in the primary directory,
    # which is the user's where there is one, so that it wins where both have a file.
    root = yaml.safe_load((asset_directory("recipes") / STARTS[start]).read_text())
    ConfigStore.instance().store(name=SCHEMA, node=Recipe)
    ConfigStore.instance().store(name=ROOT, node=root)
    extra = []
    if recipe_dir is not None:
        packaged = str(asset_directory("recipes")).replace("\\", "\\\\").replace("'", "\\'")
        extra = [f"hydra.searchpath=['file://{packaged}']"]
    GlobalHydra.instance().clear()
    primary = _roots(recipe_dir)[0]
    with initialize_config_dir(config_dir=str(primary), version_base="1.3"):
        return hydra_compose(ROOT, overrides=[*overrides, *extra])


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _readable(err: Exception) -> RecipeError:
    """One line out of Hydra's several, with the nearest right key."""
    text = f"{err}\n{err.__cause__ or ''}"
    unknown = re.search(r"Key '([^']+)' (?:is )?not in", text)
    if unknown is not None:
        key = _full_key(text) or unknown.group(1)
        if key.split(".")[0] in GROUPS and key.split(".")[0] != "site":
            group = key.split(".")[0]
            if group in ("recipe", "suite", "task"):
                return RecipeError(
                    f"{group} file sets values below {group!r}; begin it with '# @package _global_'"
                )
        try:
            check_key(key)
        except RecipeError as known:
            return known
    key = _full_key(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((ln for ln in lines if ln.startswith(("Value", "Invalid", "Could not"))), "")
    if not reason:
        reason = lines[0]
    return RecipeError(f"{key}: {reason}" if key else reason)


def _full_key(text: str) -> str | None:
    found = re.search(r"full_key: (\S+)", text)
    return found.group(1) if found else None
