"""Families about text: counting, comparing, replacing, settings, logs. Pure."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from prorl_hpc.tasks.cli.checks import Check, Lines, Number, Text
from prorl_hpc.tasks.cli.dice import ENDINGS, NOUNS, PEOPLE, Dice, Draft
from prorl_hpc.tasks.cli.families_files import SORTED
from prorl_hpc.tasks.cli.problem import Files


def count_matches(dice: Dice, level: int) -> Draft:
    """One number over many files."""
    root, out, word = dice.folder(), dice.output("txt"), dice.choice(NOUNS)
    ending, *others = dice.few(ENDINGS, 3)
    files: dict[str, str] = {}
    for number, path in enumerate(dice.paths(root, level, [ending, *others])):
        lines = dice.lines(dice.randint(2, 3 + 2 * level))
        if number == 0 or dice.random() < 0.4:
            lines.append(f"{dice.choice(NOUNS)} {word} {dice.choice([word, 'again'])}")
        if dice.random() < 0.3:
            lines.append(f"{word}s {word.upper()} un{word}")
        files[path] = "".join(f"{line}\n" for line in lines)
    texts = [text for path, text in files.items() if path.endswith(f".{ending}")]
    rows = [line.split() for text in texts for line in text.splitlines()]
    grep = f"--include='*.{ending}' -e {word} {root}"
    what, count, gold = dice.choice(
        [
            (f"lines that contain the word `{word}` (as a whole word, in small letters)",
             sum(word in row for row in rows), f"grep -rhw {grep} | wc -l"),
            (f"files that contain the word `{word}` (as a whole word, in small letters)",
             sum(word in text.split() for text in texts), f"grep -rlw {grep} | wc -l"),
            ("words (separated by blanks or line ends)", sum(map(len, rows)),
             f"find {root} -type f -name '*.{ending}' -exec cat {{}} + | wc -w"),
        ]
    )  # fmt: skip
    return Draft(
        wish=(
            f"Look at all files below `{root}`, at any depth, whose names end in `.{ending}`. "
            f"Count the {what} in all of them together, and write the number to `{out}`."
        ),
        files=dict(files),
        checks=[Number(path=out, number=count)],
        gold=f"{gold} > {out}",
    )


def word_frequency(dice: Dice, level: int) -> Draft:
    """The most frequent words of a text."""
    source, out, most = f"{dice.stem(1)}.txt", dice.output("txt"), dice.randint(2, 3 + level)
    pool = dice.few(NOUNS, 6 + 2 * level)
    rows = [dice.choices(pool, k=dice.randint(3, 8)) for _ in range(6 + 6 * level)]
    counts = Counter(word for row in rows for word in row)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
    return Draft(
        wish=(
            f"Write the {most} most frequent words of `{source}` to `{out}`, the most frequent one "
            "first, words of equal count in alphabetical order. Each line is the count, a blank "
            "and the word."
        ),
        files={source: "".join(f"{' '.join(row)}\n" for row in rows)},
        checks=[Lines(path=out, lines=[f"{count} {word}" for word, count in ranked])],
        gold=(
            f"tr -s ' ' '\\n' < {source} | LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2 "
            f"| head -n {most} | awk '{{print $1, $2}}' > {out}"
        ),
    )


def set_compare(dice: Dice, level: int) -> Draft:
    """Two lists against each other."""
    out = dice.output("txt")
    one, two = f"{dice.stem(1)}-a.txt", f"{dice.stem(1)}-b.txt"
    pool = sorted({f"{dice.choice(PEOPLE)}.{dice.choice(NOUNS)}" for _ in range(10 + 10 * level)})
    left, right = dice.few(pool, len(pool) * 2 // 3), dice.few(pool, len(pool) * 2 // 3)
    # so that neither answer is empty
    left, right = [*left, "only.first", "in.both"], [*right, "only.second", "in.both"]
    left += dice.few(left, level)
    dice.shuffle(left)
    dice.shuffle(right)
    a, b = set(left), set(right)
    what, found, gold = dice.choice(
        [
            (f"in `{one}` but not in `{two}`", a - b, f"grep -Fxv -f {two} {one}"),
            (f"in `{two}` but not in `{one}`", b - a, f"grep -Fxv -f {one} {two}"),
            (f"in both `{one}` and `{two}`", a & b, f"grep -Fx -f {two} {one}"),
            (f"in exactly one of `{one}` and `{two}`", a ^ b,
             f"{{ grep -Fxv -f {two} {one}; grep -Fxv -f {one} {two}; }}"),
        ]
    )  # fmt: skip
    return Draft(
        wish=f"Write the lines that are {what} to `{out}`, each once, {SORTED}.",
        files={one: "".join(f"{n}\n" for n in left), two: "".join(f"{n}\n" for n in right)},
        checks=[Lines(path=out, lines=sorted(found))],
        gold=f"{gold} | LC_ALL=C sort -u > {out}",
    )


KEYS = ("batch", "depth", "limit", "port", "retries", "threads", "timeout")


def config_edit(dice: Dice, level: int) -> Draft:
    """One setting in those files that another setting chooses."""
    root, key = dice.folder(), dice.choice(KEYS)
    value = dice.randint(10_000, 99_999)
    files: Files = {}
    checks: list[Check] = []
    changed = set()
    for number, path in enumerate(dice.paths(root, level, ["conf", "conf", "txt"])):
        enabled = number == 0 or dice.random() < 0.5
        keys = dice.sample(KEYS, k=len(KEYS))
        lines = [f"{one} = {dice.randint(1, 9999)}" for one in keys]
        lines.insert(dice.randint(0, 3), f"enabled = {'true' if enabled else 'false'}")
        lines.insert(0, f"# {key} = {dice.randint(1, 99)} was the old one; enabled = true")
        text = "".join(f"{line}\n" for line in lines)
        files[path] = text
        if enabled and path.endswith(".conf"):
            new = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
            checks.append(Text(path=path, text=new))
            changed.add(path)
    return Draft(
        wish=(
            f"In every file below `{root}`, at any depth, whose name ends in `.conf` and which has "
            f"the line `enabled = true`, set `{key}` to {value}: its line becomes "
            f"`{key} = {value}`. Leave comments (lines that begin with `#`) and everything else "
            "as it is."
        ),
        files=files,
        checks=checks,
        gold=(
            f"grep -rlx --include='*.conf' 'enabled = true' {root} | sort | "
            f"while IFS= read -r f; do sed -i 's/^{key} = .*/{key} = {value}/' \"$f\"; done"
        ),
        changed=frozenset(changed),
    )


def replace_word(dice: Dice, level: int) -> Draft:
    """One word for another in the files of one ending."""
    root = dice.folder()
    old, new = dice.few(NOUNS, 2)
    ending, *others = dice.few(ENDINGS, 3)
    files: Files = {}
    checks: list[Check] = []
    changed = set()
    for number, path in enumerate(dice.paths(root, level, [ending, *others])):
        lines = dice.lines(dice.randint(2, 3 + level))
        if number == 0 or dice.random() < 0.5:
            lines.append(f"{old}, the {old}s and ({old}).")
        text = "".join(f"{line}\n" for line in lines)
        files[path] = text
        after = re.sub(rf"\b{old}\b", new, text)
        if path.endswith(f".{ending}") and after != text:
            checks.append(Text(path=path, text=after))
            changed.add(path)
    return Draft(
        wish=(
            f"In all files below `{root}`, at any depth, whose names end in `.{ending}`, replace "
            f"the word `{old}` by `{new}` wherever it stands as a whole word (so not within a "
            "longer one). Leave all other files as they are."
        ),
        files=files,
        checks=checks,
        gold=(
            f"find {root} -type f -name '*.{ending}' -exec sed -i 's/\\b{old}\\b/{new}/g' {{}} +"
        ),
        changed=frozenset(changed),
    )


LEVELS = ("DEBUG", "ERROR", "INFO", "WARN")


def log_window(dice: Dice, level: int) -> Draft:
    """Lines of one level within a time, out of several logs."""
    root, out, wanted = dice.folder(), dice.output("log"), dice.choice(LEVELS)
    day = f"2024-{dice.randint(1, 12):02}-{dice.randint(1, 28):02}"
    seconds = sorted(dice.sample(range(86_400), 20 + 20 * level))
    stamps = [f"{day}T{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}" for s in seconds]
    low, high = len(stamps) // 4, len(stamps) * 3 // 4
    lines = [f"{stamp} {dice.choice(LEVELS)} {line}"
             for stamp, line in zip(stamps, dice.lines(len(stamps)), strict=True)]  # fmt: skip
    middle = (low + high) // 2
    lines[middle] = f"{stamps[middle]} {wanted} {dice.choice(NOUNS)} {dice.choice(LEVELS)}"
    logs = [f"{root}/{name}.log" for name in dice.few(NOUNS, 1 + level)]
    spread: dict[str, str] = dict.fromkeys(logs, "")
    for line in lines:
        spread[dice.choice(logs)] += f"{line}\n"
    begin, end = stamps[low], stamps[high]
    found = [line for line in lines if begin <= line.split()[0] < end and line.split()[1] == wanted]
    return Draft(
        wish=(
            f"Lines of the logs in `{root}` begin with a time and a level. Write all lines of "
            f"level {wanted} from {begin} (inclusive) to {end} (exclusive), of all `.log` files "
            f"there together, to `{out}`, in the order of their times."
        ),
        files=dict(spread),
        checks=[Lines(path=out, lines=found)],
        gold=(
            f"cat {root}/*.log | awk -v a={begin} -v b={end} "
            f"'$1 >= a && $1 < b && $2 == \"{wanted}\"' | LC_ALL=C sort > {out}"
        ),
    )


RANKED = (
    ": lines of the number of requests, a blank and the address, the largest number first, equal "
    "ones by address (sorted by bytes)"
)
COUNTED = "LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2"


def log_requests(dice: Dice, level: int) -> Draft:
    """Numbers from a log of requests."""
    log, out = f"{dice.stem(1)}.log", dice.output("txt")
    clients = [f"10.{dice.randint(0, 9)}.{dice.randint(0, 9)}.{n}" for n in range(1, 4 + 2 * level)]
    pages = [f"/{noun}" for noun in dice.few(NOUNS, 2 + level)]
    codes = ["200", "200", "200", "301", "404", "500"]
    rows = [
        (dice.choice(clients), dice.choice(["GET", "POST"]), dice.choice(pages),
         dice.choice(codes), str(dice.randint(100, 9999)))
        for _ in range(15 + 20 * level)
    ]  # fmt: skip
    page, most = rows[0][2], dice.randint(1, 2 + level)
    rows[0] = (*rows[0][:3], "200", rows[0][4])
    total = sum(int(row[4]) for row in rows if row[2] == page and row[3] == "200")
    by_code = sorted(Counter(row[3] for row in rows).items())
    ranked = sorted(Counter(row[0] for row in rows).items(), key=lambda kv: (-kv[1], kv[0]))[:most]
    wishes: list[tuple[str, Check, str]] = [
        (f"the total number of bytes of the requests for `{page}` with status 200",
         Number(path=out, number=total),
         f"awk '$3 == \"{page}\" && $4 == 200 {{s += $5}} END {{print s}}' {log}"),
        ("how many requests had each status: sorted lines of status, a blank and the number",
         Lines(path=out, lines=[f"{k} {n}" for k, n in by_code]),
         f"awk '{{c[$4]++}} END {{for (k in c) print k, c[k]}}' {log} | LC_ALL=C sort"),
        (f"the {most} clients with the most requests{RANKED}",
         Lines(path=out, lines=[f"{n} {client}" for client, n in ranked]),
         f"awk '{{print $1}}' {log} | {COUNTED} | head -n {most} | awk '{{print $1, $2}}'"),
    ]  # fmt: skip
    what, check, gold = dice.choice(wishes)
    return Draft(
        wish=(
            f"Each line of `{log}` is one request: client, method, page, status and bytes, "
            f"separated by blanks. Write to `{out}` {what}."
        ),
        files={log: "".join(f"{' '.join(row)}\n" for row in rows)},
        checks=[check],
        gold=f"{gold} > {out}",
    )


FAMILIES: Mapping[str, Callable[[Dice, int], Draft]] = MappingProxyType(
    {
        "count_matches": count_matches,
        "word_frequency": word_frequency,
        "set_compare": set_compare,
        "config_edit": config_edit,
        "replace_word": replace_word,
        "log_window": log_window,
        "log_requests": log_requests,
    }
)
