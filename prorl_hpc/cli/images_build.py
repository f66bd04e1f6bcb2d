"""`prorl-hpc images build`: several definitions at once, here or over a job array of the site.

A definition that starts from another one of the same request is built after it. Knows no build
step: `hpc.images_build` does, and makes sure that each image is built once whoever asks.
"""

import argparse
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.errors import HpcError, UserError
from hpc.files import asset_directory

if TYPE_CHECKING:
    from hpc.site import Site

CPUS, MEMORY_MIB, MINUTES = 4, 8192, 240


def add_arguments(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "names", nargs="+", metavar="NAME",
        help="of the shipped definitions (base, swe, code, vllm, learner); or one NAME FILE.def",
    )  # fmt: skip
    action.add_argument("--force", action="store_true", help="also when it is there already")
    action.add_argument("--scratch", type=Path, help="local disk for the work")
    action.add_argument("--site", metavar="NAME", help="build over a job array of this site")
    action.add_argument("--recipe-dir", type=Path, metavar="DIR", help="where site/NAME.yaml is")
    action.add_argument("--at-once", type=int, default=2, metavar="N", help="(2)")
    action.add_argument("--logs", type=Path, metavar="DIR", help="shared directory for its logs")


def build(store: Path, args: argparse.Namespace) -> int:
    """Builds all; 1 when one failed. Raises UserError for what can't be asked."""
    if args.at_once < 1:
        raise UserError(f"--at-once {args.at_once} is below 1")
    wanted = definitions(args.names)
    site = _site(args) if args.site else None
    failed: set[str] = set()
    for wave in waves(wanted):
        ready = {name: wanted[name] for name in wave if not failed & _bases(name, wanted)}
        for name in wave:
            if name not in ready:
                print(f"{name}: not built, for what it starts from wasn't")
        said = _over_an_array(store, ready, site, args) if site else _here(store, ready, args)
        for name, (good, text) in said.items():
            print(f"{name}: {text}", flush=True)
            if not good:
                failed.add(name)
        failed |= set(wave) - ready.keys()
    return int(bool(failed))


def definitions(names: list[str]) -> dict[str, Path]:
    """Name -> definition file. Raises UserError."""
    if len(names) == 2 and (names[1].endswith(".def") or "/" in names[1]):
        return {names[0]: Path(names[1]).expanduser().absolute()}
    shipped = asset_directory("singularity")
    found = {name: shipped / f"{name}.def" for name in names}
    for name, path in found.items():
        if not path.is_file():
            known = ", ".join(sorted(one.stem for one in shipped.glob("*.def")))
            raise UserError(
                f"no definition {name!r} is shipped (there are {known}); give a file: "
                f"prorl-hpc images build {name} FILE.def"
            )
    return found


def waves(wanted: Mapping[str, Path]) -> list[list[str]]:
    """The names in groups that can be built at the same time. Raises UserError for a circle."""
    left, found = dict(wanted), list[list[str]]()
    while left:
        wave = [name for name in left if not _bases(name, wanted) & left.keys()]
        if not wave:
            raise UserError(f"definitions {', '.join(left)} start from each other")
        found.append(wave)
        for name in wave:
            del left[name]
    return found


def _bases(name: str, wanted: Mapping[str, Path]) -> set[str]:
    """Images of the same request that `name` starts from."""
    try:
        text = wanted[name].read_text()
    except (OSError, ValueError) as err:
        raise UserError(f"definition {wanted[name]} can't be read: {err}") from err
    return {other for other in wanted if other != name and f"{other}.sif" in text}


def build_one(
    store: Path, scratch: Path | None, force: bool, named: tuple[str, Path]
) -> tuple[bool, str]:
    """(whether it is there now, what to tell). One element of the array."""
    from hpc.container_probe import probe
    from hpc.images import ImageStore
    from hpc.images_build import build_image

    name, definition = named
    try:
        record = build_image(
            ImageStore(store, scratch=scratch), name, definition=definition,
            runtime=probe().runtime, force=force,
        )  # fmt: skip
    except HpcError as err:
        return False, f"FAILED: {err}"
    return True, f"{record.num_bytes / 2**20:.0f} MiB, sha256 {record.sha256}"


def _here(
    store: Path, ready: Mapping[str, Path], args: argparse.Namespace
) -> dict[str, tuple[bool, str]]:
    one = functools.partial(build_one, store, args.scratch, args.force)
    with ThreadPoolExecutor(args.at_once) as pool:
        return dict(zip(ready, pool.map(one, ready.items()), strict=True))


def _over_an_array(
    store: Path, ready: Mapping[str, Path], site: "Site", args: argparse.Namespace
) -> dict[str, tuple[bool, str]]:
    from hpc.fanout import Done, fan_out
    from hpc.plan import Resources

    if not ready:
        return {}
    # a node's own disk, unless the user knows a better place
    scratch = args.scratch or Path(site.scratch)
    logs = args.logs or store / ".logs"
    logs.mkdir(parents=True, exist_ok=True)
    results = fan_out(
        functools.partial(build_one, store, scratch, args.force),
        list(ready.items()),
        site=site,
        role="images",
        resources=Resources(
            nodes=1, cpus_per_node=CPUS, gpus_per_node=0, memory_mib=MEMORY_MIB,
            walltime_minutes=MINUTES,
        ),
        directory=logs.absolute(),
        at_once=args.at_once,
        timeout_seconds=MINUTES * 60.0 * (len(ready) // args.at_once + 1),
    )  # fmt: skip
    return {
        name: one.value if isinstance(one, Done) else (False, f"FAILED: {one.error}")
        for name, one in zip(ready, results, strict=True)
    }


def _site(args: argparse.Namespace) -> "Site":
    from prorl_hpc.cli.submit import compose_recipe
    from prorl_hpc.recipe import site_of

    overrides = ["recipe=quickstart", f"site={args.site}"]
    return site_of(compose_recipe(overrides, recipe_dir=args.recipe_dir, name=None))
