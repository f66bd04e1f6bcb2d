"""`prorl-hpc images`: the shared, digest-locked store of container images."""

import argparse
import os
from pathlib import Path

from hpc.errors import UserError
from prorl_hpc.cli import images_build
from prorl_hpc.cli.table import table

STORE_VARIABLE = "PRORL_IMAGES"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Container images, built or imported once and shared read-only. "
        f"The store is --store, else ${STORE_VARIABLE}."
    )
    parser.add_argument("--store", type=Path, metavar="DIR")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="what the store holds")
    check = actions.add_parser("verify", help="compare files with images.lock")
    check.add_argument("name", nargs="*", help="all, unless named")
    made = actions.add_parser("import", help="take a SIF file, a directory, or an archive")
    made.add_argument("name")
    made.add_argument("source", type=Path, help="docker/OCI archive or directory, root directory")
    made.add_argument("--force", action="store_true", help="also when it is there already")
    made.add_argument("--scratch", type=Path, help="local disk for the work")
    images_build.add_arguments(
        actions.add_parser("build", help="build from definitions, here or over a job array")
    )
    unpack = actions.add_parser(
        "unpack", help="as a directory on local disk, once per digest; for nodes without squashfuse"
    )
    unpack.add_argument("name")
    unpack.add_argument("--cache", type=Path, required=True, metavar="DIR", help="yours alone")
    convert = actions.add_parser("convert", help="a Dockerfile as a definition file, printed")
    convert.add_argument("source", type=Path)
    convert.add_argument("--base", help="image file that replaces the Dockerfile's FROM")
    remove = actions.add_parser("remove", help="delete one image")
    remove.add_argument("name")
    collect = actions.add_parser("gc", help="delete what no line of images.lock names")
    collect.add_argument("--dry-run", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.action == "convert":
        return _convert(args)
    from hpc.images import ImageStore

    where = _store_path(args.store)
    if args.action not in ("import", "build") and not where.is_dir():
        raise UserError(f"image store {str(where)!r} isn't a directory; import or build makes one")
    store = ImageStore(where, scratch=getattr(args, "scratch", None))
    if args.action == "list":
        rows = [
            (r.name, f"{r.num_bytes / 2**20:.0f} MiB", r.sha256[:16], r.source)
            for r in store.list()
        ]
        print(table(("image", "size", "sha256", "from"), rows))
        return 0
    if args.action == "verify":
        return _verify(store, args.name)
    if args.action == "remove":
        store.remove(args.name)
        print(f"{args.name} removed")
        return 0
    if args.action == "gc":
        for path in store.gc(dry_run=args.dry_run):
            print(f"{'would delete' if args.dry_run else 'deleted'} {path}")
        return 0
    if args.action == "unpack":
        return _unpack(store, args)
    if args.action == "build":
        return images_build.build(where, args)
    return _import(store, args)


def _unpack(store: "object", args: argparse.Namespace) -> int:
    from hpc.container_probe import probe
    from hpc.images import ImageStore
    from hpc.images_build import unpack_image

    assert isinstance(store, ImageStore)
    cache = args.cache.expanduser().absolute()
    print(unpack_image(store, args.name, cache=cache, runtime=probe().runtime))
    return 0


def _store_path(given: Path | None) -> Path:
    text = str(given) if given is not None else os.environ.get(STORE_VARIABLE, "")
    if not text:
        raise UserError(f"no image store is named; give --store DIR or set {STORE_VARIABLE}")
    return Path(text).expanduser().absolute()


def _verify(store: "object", names: list[str]) -> int:
    from hpc.errors import ImageError
    from hpc.images import ImageStore

    assert isinstance(store, ImageStore)
    found = [(v.name, v.problem) for v in store.verify_all()] if not names else []
    for name in names:
        try:
            store.verify(name)
            found.append((name, ""))
        except ImageError as err:
            found.append((name, str(err)))
    for name, problem in found:
        print(f"{name}: {problem or 'as locked'}")
    return 1 if any(problem for _, problem in found) else 0


def _import(store: "object", args: argparse.Namespace) -> int:
    from hpc.container_probe import probe
    from hpc.images import ImageStore
    from hpc.images_build import import_image

    assert isinstance(store, ImageStore)
    record = import_image(
        store, args.name, source=args.source, runtime=probe().runtime, force=args.force
    )
    print(f"{store.path(record.name)}: {record.num_bytes / 2**20:.0f} MiB, sha256 {record.sha256}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    import sys

    from hpc.images_convert import convert_dockerfile

    conversion = convert_dockerfile(args.source, base=args.base)
    print(conversion.text, end="")
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
