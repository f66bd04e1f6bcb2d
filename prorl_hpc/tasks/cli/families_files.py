"""Families about files themselves: finding, renaming, moving, packing, linking. Pure."""

import base64
import posixpath
from collections.abc import Callable, Mapping
from types import MappingProxyType

from prorl_hpc.tasks.cli.checks import (
    Absent,
    Archive,
    Check,
    Digest,
    Lines,
    Link,
    Mode,
    Names,
)
from prorl_hpc.tasks.cli.dice import ENDINGS, NOUNS, Dice, Draft, digest
from prorl_hpc.tasks.cli.problem import Files, FileSpec
from prorl_hpc.tasks.cli.state import Entry, EntryKind, pack

SORTED = "one per line, sorted by bytes (as `LC_ALL=C sort` does)"


def find_files(dice: Dice, level: int) -> Draft:
    """Paths of files by name and one property more."""
    root, out = dice.folder(), dice.output("txt")
    ending, *others = dice.few(ENDINGS, 4)
    paths = dice.paths(root, level, [ending, *others])
    mark = f"{dice.choice(['CASE', 'ITEM', 'NOTE', 'TICKET'])}-{dice.randint(1000, 9999)}"
    files = {path: dice.text(dice.randint(1, 6)) for path in paths}
    files[f"{root}/{dice.stem(level)}.{ending}.orig"] = dice.text(3)
    files[f"{root}/{dice.stem(1)}{ending}"] = f"{mark}\n{dice.text(3)}"
    for path in [paths[0], *dice.few(paths, level + 1)]:
        files[path] = f"{files[path]}{mark} {dice.choice(NOUNS)}\n"
    named = [path for path in paths if path.endswith(f".{ending}")]
    bound = len(files[dice.choice(named)]) - 1
    rules: list[tuple[str, str, Callable[[str], bool]]] = [
        ("", "", lambda _: True),
        (f" and that are larger than {bound} bytes", f" -size +{bound}c",
         lambda text: len(text) > bound),
        (f" and that contain the text `{mark}`", f" -exec grep -qF '{mark}' {{}} \\;",
         lambda text: mark in text),
    ]  # fmt: skip
    extra, tail, keep = dice.choice(rules)
    found = sorted(path.removeprefix(f"{root}/") for path in named if keep(files[path]))
    return Draft(
        wish=(
            f"Find all files below `{root}`, at any depth, whose names end in `.{ending}`{extra}. "
            f"Write their paths, relative to `{root}`, to `{out}`, {SORTED}."
        ),
        files=dict(files),
        checks=[Lines(path=out, lines=found)],
        gold=(
            f"find {root} -type f -name '*.{ending}'{tail} -print | sed 's|^{root}/||' "
            f"| LC_ALL=C sort > {out}"
        ),
    )


Renaming = tuple[str, Callable[[str], str], str]
"""(the wish's words, old name -> new name, shell for the new name from $d and $b)."""


def _renaming(dice: Dice, ending: str, new_ending: str) -> Renaming:
    prefix = f"{dice.choice(NOUNS)}-"
    return dice.choice(
        [
            (f"so that they end in `.{new_ending}` instead",
             lambda b: f"{b.removesuffix(ending)}{new_ending}",
             f'"$d/${{b%.{ending}}}.{new_ending}"'),
            (f"by putting `{prefix}` in front of their names", lambda b: f"{prefix}{b}",
             f'"$d/{prefix}$b"'),
            ("by making all letters of their names small", str.lower,
             '"$d/$(printf %s "$b" | tr A-Z a-z)"'),
            ("by putting `_` for every blank in their names", lambda b: b.replace(" ", "_"),
             '"$d/$(printf %s "$b" | tr " " _)"'),
        ]
    )  # fmt: skip


def rename_files(dice: Dice, level: int) -> Draft:
    """New names by one rule, for the files of one ending."""
    root = dice.folder()
    ending, new_ending, *others = dice.few(ENDINGS, 5)
    words, rule, shell = _renaming(dice, ending, new_ending)
    files: Files = {}
    plain = set()
    for path in dice.paths(root, level, [ending, *others]):
        place, base = posixpath.split(path)
        odd = base if dice.random() < 0.3 else base.capitalize().replace("_", " ", 1)
        flat = f"{place}/{odd}".lower().replace(" ", "_")
        if flat not in plain:  # no two become the same name
            plain.add(flat)
            files[f"{place}/{odd}"] = dice.text(dice.randint(1, 3))
    # one at least is new by every rule
    files[f"{root}/First {dice.choice(NOUNS)}-{dice.randint(100, 999)}.{ending}"] = dice.text(2)
    moved = {path: f"{posixpath.dirname(path)}/{rule(posixpath.basename(path))}"
             for path in files if path.endswith(f".{ending}")}  # fmt: skip
    moved = {old: new for old, new in moved.items() if old != new}
    after = {moved.get(path, path): given for path, given in files.items()}
    names = [path.removeprefix(f"{root}/") for path in after]
    checks: list[Check] = [Names(path=root, names=names)]
    checks += [Digest(path=new, sha256=digest(str(after[new]))) for new in moved.values()]
    return Draft(
        wish=(
            f"Rename all files below `{root}`, at any depth, whose names end in `.{ending}`, "
            f"{words}. Leave them in their directories, and all other files as they are."
        ),
        files=files,
        checks=checks,
        gold=(
            f"find {root} -type f -name '*.{ending}' | sort | while IFS= read -r f; do\n"
            f'  d=$(dirname "$f"); b=$(basename "$f"); n={shell}\n'
            '  [ "$f" = "$n" ] || mv -- "$f" "$n"\ndone'
        ),
        changed=frozenset(moved),
    )


def organise(dice: Dice, level: int) -> Draft:
    """Files of one directory into directories by ending, or by year."""
    root = dice.folder()
    endings = dice.few(ENDINGS, 2 + level)
    by_year = dice.random() < 0.5
    files: Files = {}
    for _ in range(4 + 4 * level):
        day = f"{dice.randint(2015, 2024)}-{dice.randint(1, 12):02}-{dice.randint(1, 28):02}"
        files[f"{root}/{day}_{dice.stem(level)}.{dice.choice(endings)}"] = dice.text(2)

    def place(path: str) -> str:
        name = posixpath.basename(path)
        return f"{name[:4] if by_year else name.rpartition('.')[2]}/{name}"

    example = place(next(iter(files)))
    rule = "the year that its name begins with" if by_year else "its ending (what follows the dot)"
    shell = "${f%%-*}" if by_year else "${f##*.}"
    checks: list[Check] = [Names(path=root, names=[place(path) for path in files])]
    checks += [Digest(path=f"{root}/{place(p)}", sha256=digest(str(t))) for p, t in files.items()]
    return Draft(
        wish=(
            f"Move every file in `{root}` into a directory below `{root}` that is named by {rule}: "
            f"one of them ends up as `{root}/{example}`."
        ),
        files=files,
        checks=checks,
        gold=(
            f"cd {root} && for f in *; do\n"
            f'  [ -f "$f" ] || continue; mkdir -p "{shell}"; mv -- "$f" "{shell}/"\ndone'
        ),
        changed=frozenset(files),
    )


def dedupe(dice: Dice, level: int) -> Draft:
    """Of equal files only the first stays."""
    root = dice.folder()
    paths = dice.paths(root, level, dice.few(ENDINGS, 3))
    texts = [dice.text(dice.randint(1, 4)) for _ in range(len(paths) // 2)]
    files: Files = {path: dice.choice(texts) for path in paths}
    first: dict[str, str] = {}
    for path in sorted(paths):
        first.setdefault(str(files[path]), path)
    gone = frozenset(set(paths) - set(first.values()))
    return Draft(
        wish=(
            f"Some files below `{root}` have exactly the same content. Of each set of equal files "
            "keep the one whose path comes first (sorted by bytes, as `LC_ALL=C sort` does), and "
            "delete the others."
        ),
        files=files,
        checks=[Names(path=root, names=[p.removeprefix(f"{root}/") for p in first.values()])],
        gold=(
            f"cd {root} && find . -type f | LC_ALL=C sort | while IFS= read -r f; do\n"
            '  s=$(sha256sum < "$f" | cut -c1-64)\n'
            '  case "$seen" in *"$s"*) rm -- "$f" ;; *) seen="$seen $s" ;; esac\ndone'
        ),
        changed=gone,
    )


def permissions(dice: Dice, level: int) -> Draft:
    """Modes by ending."""
    root = dice.folder()
    endings = dice.few(ENDINGS, 4)
    rules = dict(
        zip(endings, dice.few(["600", "640", "660", "700", "750", "755"], 2), strict=False)
    )
    files: Files = {}
    checks: list[Check] = []
    for number, path in enumerate(dice.paths(root, level, endings)):
        mode = "644" if number == 0 else dice.choice(["600", "640", "644", "664", "755"])
        files[path] = FileSpec(text=dice.text(1), mode=mode)
        checks.append(Mode(path=path, mode=rules.get(path.rpartition(".")[2], mode)))
    wishes = [f"every file that ends in `.{e}` the permissions {mode}" for e, mode in rules.items()]
    return Draft(
        wish=(
            f"Below `{root}`, at any depth, give {' and '.join(wishes)} (octal). Leave the "
            "permissions of all other files as they are."
        ),
        files=files,
        checks=checks,
        gold="\n".join(
            f"find {root} -type f -name '*.{ending}' -exec chmod {mode} {{}} +"
            for ending, mode in rules.items()
        ),
    )


def archive_make(dice: Dice, level: int) -> Draft:
    """Some files into an archive, and away."""
    root, below = dice.folder(), dice.choice(NOUNS)
    ending, other = dice.few(ENDINGS, 2)
    out = f"{dice.choice(NOUNS)}-{dice.randint(1, 99)}.tar.gz"
    files: Files = {}
    for _ in range(3 + 2 * level):
        files[f"{root}/{dice.stem(level)}.{ending}"] = dice.text(dice.randint(1, 5))
    packed = {posixpath.basename(path): digest(str(text)) for path, text in files.items()}
    gone = frozenset(files)
    for _ in range(1 + level):
        files[f"{root}/{dice.stem(level)}.{other}"] = dice.text(2)
        files[f"{root}/{below}/{dice.stem(level)}.{ending}"] = dice.text(2)
    return Draft(
        wish=(
            f"Pack the files directly in `{root}` (not in directories below it) whose names end in "
            f"`.{ending}` into the gzip-compressed tar archive `{out}`, under their bare names "
            f"(without `{root}/`). Then delete them from `{root}`. Leave all other files there."
        ),
        files=files,
        checks=[Archive(path=out, files=packed), *(Absent(path=path) for path in sorted(gone))],
        gold=f"(cd {root} && tar -czf ../{out} -- *.{ending} && rm -- *.{ending})",
        changed=gone,
    )


def archive_read(dice: Dice, level: int) -> Draft:
    """Some members of an archive, into one directory."""
    root, out = dice.choice(NOUNS), dice.folder()
    ending, *others = dice.few(ENDINGS, 3)
    archive = f"{dice.choice(['backup', 'bundle', 'export'])}-{dice.randint(1, 99)}.tar"
    state: dict[str, Entry] = {}
    wanted: dict[str, str] = {}
    bases: set[str] = set()
    for path in dice.paths(root, level, [ending, *others]):
        base = posixpath.basename(path)
        if base in bases:  # names must stay apart in one directory
            continue
        bases.add(base)
        text = dice.text(dice.randint(1, 4))
        state[f"/{path}"] = Entry(kind=EntryKind.file, data=text.encode())
        if base.endswith(f".{ending}"):
            wanted[base] = digest(text)
    checks: list[Check] = [Names(path=out, names=list(wanted))]
    checks += [Digest(path=f"{out}/{name}", sha256=value) for name, value in wanted.items()]
    return Draft(
        wish=(
            f"From the tar archive `{archive}`, extract the files whose names end in `.{ending}`, "
            f"wherever in it they are, and put them all directly into a new directory `{out}`. "
            "Nothing else may be in it."
        ),
        files={archive: FileSpec(base64=base64.b64encode(pack(state)).decode())},
        checks=checks,
        gold=(
            f'mkdir -p {out} && t=$(mktemp -d) && tar -xf {archive} -C "$t" && '
            f'find "$t" -type f -name \'*.{ending}\' -exec cp -- {{}} {out}/ \\; && rm -rf "$t"'
        ),
    )


def links(dice: Dice, level: int) -> Draft:
    """A link to the newest version of each program."""
    root, name = dice.folder(), dice.choice(["current", "latest", "stable"])
    files: Files = {}
    checks: list[Check] = []
    changed = set()
    for number, app in enumerate(dice.few(NOUNS, 2 + 2 * level)):
        versions: list[tuple[int, ...]] = []
        while len(versions) < 2 + level:
            version = tuple(dice.randint(0, 12) for _ in range(3))
            if version not in versions:
                versions.append(version)
        texts = [".".join(map(str, version)) for version in versions]
        for text in texts:
            files[f"{root}/{app}/{text}/VERSION"] = f"{app} {text}\n"
        link = f"{root}/{app}/{name}"
        if number and dice.random() < 0.4:
            files[link] = FileSpec(link=dice.choice(texts))
            changed.add(link)
        checks.append(Link(path=link, target=".".join(map(str, max(versions)))))
    return Draft(
        wish=(
            f"Each directory in `{root}` belongs to a program and holds directories named by its "
            f"versions. In each program's directory make a symbolic link `{name}` to the highest "
            "version (compared number by number: 1.10.0 is higher than 1.9.3). The link's target "
            "is just the name of the version's directory. Replace links that are there already."
        ),
        files=files,
        checks=checks,
        gold=(
            f"for d in {root}/*/; do\n"
            "  v=$(ls \"$d\" | grep -E '^[0-9.]+$' | sort -V | tail -n 1)\n"
            f'  ln -sfn "$v" "${{d}}{name}"\ndone'
        ),
        changed=frozenset(changed),
    )


def checksums(dice: Dice, level: int) -> Draft:
    """Which files don't match their digests."""
    root, out = dice.folder(), dice.output("txt")
    names = [f"{dice.stem(1)}-{number}.dat" for number in range(4 + 4 * level)]
    texts = {name: dice.text(dice.randint(1, 4)) for name in names}
    sums = "".join(f"{digest(text)}  {name}\n" for name, text in texts.items())
    wrong = dice.few(names, 1 + dice.randint(1, level))
    files: Files = {f"{root}/SHA256SUMS": sums}
    for name in names:
        if name != wrong[0]:
            files[f"{root}/{name}"] = texts[name] + ("changed\n" if name in wrong else "")
    if dice.random() < 0.5:  # else the first is missing
        files[f"{root}/{wrong[0]}"] = dice.text(1) + "other\n"
    return Draft(
        wish=(
            f"`{root}/SHA256SUMS` lists the SHA-256 digests of files in `{root}`. Write to `{out}` "
            f"the names of the listed files that are missing or whose content doesn't match, "
            f"{SORTED}."
        ),
        files=files,
        checks=[Lines(path=out, lines=sorted(wrong))],
        gold=(
            f"(cd {root} && sha256sum -c SHA256SUMS 2>/dev/null) | grep -v ': OK$' "
            f"| sed 's/: FAILED.*$//' | LC_ALL=C sort > {out}"
        ),
    )


FAMILIES: Mapping[str, Callable[[Dice, int], Draft]] = MappingProxyType(
    {
        "find_files": find_files,
        "rename_files": rename_files,
        "organise": organise,
        "dedupe": dedupe,
        "permissions": permissions,
        "archive_make": archive_make,
        "archive_read": archive_read,
        "links": links,
        "checksums": checksums,
    }
)
