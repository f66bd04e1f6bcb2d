"""Families about tables and JSON: sorting, grouping, filtering, joining, splitting. Pure."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from prorl_hpc.tasks.cli.checks import Check, Json, Lines, Names, Text
from prorl_hpc.tasks.cli.dice import CITIES, NOUNS, PEOPLE, Dice, Draft
from prorl_hpc.tasks.cli.families_files import SORTED
from prorl_hpc.tasks.cli.problem import Files

HEADER = ("name", "city", "team", "age", "score")
Row = tuple[str, str, str, int, int]


def _table(dice: Dice, level: int) -> list[Row]:
    """People with distinct names; few cities and teams, so that there is something to group."""
    cities, teams = dice.few(CITIES, 2 + level), dice.few(NOUNS, 2 + level)
    names = sorted({f"{dice.choice(PEOPLE)}-{dice.choice(NOUNS)}" for _ in range(8 + 10 * level)})
    dice.shuffle(names)
    return [
        (name, dice.choice(cities), dice.choice(teams), dice.randint(18, 80), dice.randint(0, 200))
        for name in names
    ]


def _line(row: tuple[object, ...]) -> str:
    return ",".join(map(str, row))


def _csv(rows: list[Row], header: tuple[str, ...] = HEADER) -> str:
    return "".join(f"{_line(row)}\n" for row in [header, *rows])


def _source(dice: Dice) -> str:
    return f"{dice.choice(NOUNS)}-{dice.randint(1, 999)}.csv"


def sort_table(dice: Dice, level: int) -> Draft:
    """The best rows of a table."""
    source, out, rows = _source(dice), dice.output("csv"), _table(dice, level)
    column, most = dice.choice([3, 4]), dice.randint(2, 4 + 2 * level)
    ranked = sorted(rows, key=lambda row: (-int(row[column]), row[0]))[:most]
    return Draft(
        wish=(
            f"Sort the rows of the table `{source}` by `{HEADER[column]}`, the largest number "
            "first, rows of equal number by `name` (sorted by bytes). Write the header and the "
            f"first {most} of the sorted rows to `{out}`."
        ),
        files={source: _csv(rows)},
        checks=[Lines(path=out, lines=[_line(HEADER), *map(_line, ranked)])],
        gold=(
            f"{{ head -n 1 {source}; tail -n +2 {source} | LC_ALL=C sort -t, "
            f"-k{column + 1},{column + 1}nr -k1,1 | head -n {most}; }} > {out}"
        ),
    )


def group_table(dice: Dice, level: int) -> Draft:
    """One number per group."""
    source, out, rows = _source(dice), dice.output("txt"), _table(dice, level)
    by, column = dice.choice([1, 2]), dice.choice([3, 4])
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(str(row[by]), []).append(int(row[column]))
    k, v = f"${by + 1}", f"${column + 1}"
    label = HEADER[column]
    sums: list[tuple[str, Callable[[list[int]], int], str]] = [
        (f"the sum of `{label}`", sum, f"g[{k}] += {v}"),
        (
            f"the largest `{label}`",
            max,
            f"if (!({k} in g) || {v} + 0 > g[{k}]) g[{k}] = {v} + 0",
        ),
        ("the number of rows", len, f"g[{k}]++"),
    ]
    what, combine, step = dice.choice(sums)
    return Draft(
        wish=(
            f"For each `{HEADER[by]}` in the table `{source}` find {what}, and write lines of the "
            f"{HEADER[by]}, a blank and the number to `{out}`, {SORTED}."
        ),
        files={source: _csv(rows)},
        checks=[Lines(path=out, lines=sorted(f"{key} {combine(n)}" for key, n in groups.items()))],
        gold=(
            f"awk -F, 'NR > 1 {{{step}}} END {{for (k in g) print k, g[k]}}' {source} "
            f"| LC_ALL=C sort > {out}"
        ),
    )


def filter_table(dice: Dice, level: int) -> Draft:
    """Some columns of some rows."""
    source, out, rows = _source(dice), dice.output("csv"), _table(dice, level)
    by, column = dice.choice([1, 2]), dice.choice([3, 4])
    chosen = dice.choice(rows)
    bound = int(chosen[column]) - dice.randint(1, 9)
    first, second = dice.sample([0, 1, 2, 3, 4], k=2)
    found = [f"{row[first]},{row[second]}" for row in rows
             if row[by] == chosen[by] and int(row[column]) > bound]  # fmt: skip
    return Draft(
        wish=(
            f"From the table `{source}` take the rows whose `{HEADER[by]}` is `{chosen[by]}` and "
            f"whose `{HEADER[column]}` is larger than {bound}. Write their `{HEADER[first]}` and "
            f"`{HEADER[second]}`, separated by a comma, to `{out}`: in the order of the table, "
            "without a header."
        ),
        files={source: _csv(rows)},
        checks=[Lines(path=out, lines=found)],
        gold=(
            f'awk -F, \'NR > 1 && ${by + 1} == "{chosen[by]}" && ${column + 1} + 0 > {bound} '
            f'{{print ${first + 1} "," ${second + 1}}}\' {source} > {out}'
        ),
    )


def join_tables(dice: Dice, level: int) -> Draft:
    """Two tables by their common key."""
    one, two, out = f"a-{_source(dice)}", f"b-{_source(dice)}", dice.output("csv")
    keys = [f"k{number}" for number in dice.sample(range(100, 1000), 8 + 8 * level)]
    left = {key: dice.choice(PEOPLE) for key in keys if dice.random() < 0.7 or key == keys[0]}
    right = {key: dice.choice(CITIES) for key in keys if dice.random() < 0.7 or key == keys[0]}
    others = list(right)
    dice.shuffle(others)
    found = sorted(f"{key},{left[key]},{right[key]}" for key in left.keys() & right.keys())
    return Draft(
        wish=(
            f"`{one}` and `{two}` are tables with the key `id` in their first column. For each id "
            f"that is in both, write a line of the id, the name from `{one}` and the city from "
            f"`{two}`, separated by commas, to `{out}`, {SORTED}. Write no header."
        ),
        files={
            one: "id,name\n" + "".join(f"{key},{left[key]}\n" for key in left),
            two: "id,city\n" + "".join(f"{key},{right[key]}\n" for key in others),
        },
        checks=[Lines(path=out, lines=found)],
        gold=(
            "awk -F, 'FNR == 1 {next} NR == FNR {n[$1] = $2; next} $1 in n "
            f'{{print $1 "," n[$1] "," $2}}\' {one} {two} | LC_ALL=C sort > {out}'
        ),
    )


def split_table(dice: Dice, level: int) -> Draft:
    """A table into one file per group."""
    source, place, rows = _source(dice), dice.folder(), _table(dice, level)
    by = dice.choice([1, 2])
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[by]), []).append(row)
    checks: list[Check] = [Names(path=place, names=[f"{key}.csv" for key in groups])]
    checks += [Text(path=f"{place}/{key}.csv", text=_csv(part)) for key, part in groups.items()]
    return Draft(
        wish=(
            f"Split the table `{source}` by `{HEADER[by]}`: for each value write the header and "
            f"the rows with this value, in the order of the table, to `{place}/VALUE.csv` in a new "
            f"directory `{place}`."
        ),
        files={source: _csv(rows)},
        checks=checks,
        gold=(
            f"mkdir -p {place} && awk -F, 'NR == 1 {{h = $0; next}} "
            f'{{f = "{place}/" ${by + 1} ".csv"; if (!(f in s)) {{print h > f; s[f] = 1}} '
            f"print > f}}' {source}"
        ),
    )


def json_lines(dice: Dice, level: int) -> Draft:
    """Some records of JSON lines."""
    source, out = f"{dice.choice(NOUNS)}.jsonl", dice.output("txt")
    kinds = dice.few(NOUNS, 2 + level)
    records: list[dict[str, Any]] = [
        {"id": f"r{number}", "user": {"name": dice.choice(PEOPLE), "city": dice.choice(CITIES)},
         "kind": dice.choice(kinds), "amount": dice.randint(1, 500), "open": dice.random() < 0.5}
        for number in dice.sample(range(1000, 10_000), 8 + 8 * level)
    ]  # fmt: skip
    chosen = dice.choice(records)
    kind, bound, is_open = chosen["kind"], chosen["amount"] - 1, chosen["open"]
    found = [f"{r['id']} {r['user']['name']}" for r in records
             if r["kind"] == kind and r["amount"] > bound and r["open"] is is_open]  # fmt: skip
    word = "true" if is_open else "false"
    test = f"r['kind'] == '{kind}' and r['amount'] > {bound} and r['open'] is {is_open}"
    return Draft(
        wish=(
            f"Each line of `{source}` is a JSON object. Of those whose `kind` is `{kind}`, whose "
            f"`amount` is larger than {bound} and whose `open` is {word}, write the `id`, a blank "
            f"and the `name` within `user` to `{out}`, one per line in the order of the file."
        ),
        files={source: "".join(f"{json.dumps(record)}\n" for record in records)},
        checks=[Lines(path=out, lines=found)],
        gold=(
            f"python3 - <<'END' > {out}\nimport json\nfor line in open('{source}'):\n"
            f"    r = json.loads(line)\n    if {test}:\n"
            "        print(r['id'], r['user']['name'])\nEND"
        ),
    )


def json_edit(dice: Dice, level: int) -> Draft:
    """A few values in a JSON document."""
    path = f"{dice.choice(NOUNS)}.json"
    sections = dice.few(NOUNS, 2 + level)
    document: dict[str, dict[str, Any]] = {
        section: {key: dice.randint(1, 99) for key in dice.few(PEOPLE, 2 + level)}
        for section in sections
    }
    after = {section: dict(values) for section, values in document.items()}
    wishes, steps = [], []
    for section in dice.few(sections, 1 + level // 2):
        keys = dice.few(list(after[section]), 2)
        value = dice.randint(100, 999)
        after[section][keys[0]] = value
        del after[section][keys[1]]
        wishes.append(f"set `{keys[0]}` of `{section}` to {value} and remove `{keys[1]}` from it")
        steps.append(f"d['{section}']['{keys[0]}'] = {value}; del d['{section}']['{keys[1]}']")
    files: Files = {path: json.dumps(document, indent=2) + "\n"}
    return Draft(
        wish=f"In the JSON document `{path}` {'; '.join(wishes)}. Change no other value.",
        files=files,
        checks=[Json(path=path, value=after)],
        gold=(
            f"python3 - <<'END'\nimport json\nd = json.load(open('{path}'))\n"
            + "\n".join(steps)
            + f"\njson.dump(d, open('{path}', 'w'), indent=2)\nEND"
        ),
        changed=frozenset([path]),
    )


FAMILIES: Mapping[str, Callable[[Dice, int], Draft]] = MappingProxyType(
    {
        "sort_table": sort_table,
        "group_table": group_table,
        "filter_table": filter_table,
        "join_tables": join_tables,
        "split_table": split_table,
        "json_lines": json_lines,
        "json_edit": json_edit,
    }
)
