"""Randomness in words: names, trees of files, lines of text, all from one seed. Knows no family."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_hpc.tasks.cli.checks import Check
from prorl_hpc.tasks.cli.problem import Files


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NOUNS = words("""
anchor apple arrow badge basin beacon bridge bucket cabin candle canyon castle cedar cloud
copper coral cradle crane delta desk ember engine falcon feather fern flint forest fountain
garden glacier harbor hazel helmet island ivory jacket kettle ladder lantern lemon lily magnet
maple marble meadow mirror needle oak orbit otter paddle pebble pepper pillar planet prism
quartz raven ribbon river saddle sail shadow silver spruce summit temple thistle timber tunnel
valley velvet violin walnut willow window winter zephyr
""")
ADJECTIVES = words("""
amber ancient blue bold brave bright calm cold dark deep early fast final first fresh green
happy heavy hidden late light long lost lucky new noisy old pale plain quiet rapid red round
sharp short slow small soft spare steady stray sunny sweet tall thin tiny warm wide wild young
""")
PEOPLE = words("""
ada alan anna arthur bea boris carl clara dora edgar elsa emil eva felix frida gina hugo ida
ines ivan jana karl lena leo lila luis mara mia nils nora olga oscar otto pablo paula rosa ruth
sara simon tina tom ulla vera viktor wanda xenia yara zoe
""")
CITIES = words("""
athens bergen bilbao bremen cadiz cork dakar delft geneva ghent graz hanoi izmir kazan kyoto
lagos leeds lima lisbon lyon malmo minsk nantes naples oslo paris porto quito riga rome seville
siena sofia split tampa tartu turin utrecht varna vienna warsaw york zagreb zurich
""")
ENDINGS = words("""
bak cfg conf csv dat html ini json log md old py rst sh tmp txt xml yaml
""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What a family draws."""

    wish: str
    """What is to be done; paths are relative to the working directory."""
    files: Files
    checks: list[Check]
    gold: str
    """A shell script that does it, run in the working directory; knows the wish alone."""
    changed: frozenset[str] = field(default_factory=frozenset)
    """Files that may change or go; all others must stay as they are."""


class Dice(random.Random):
    """Draws; the same sequence for the same seed."""

    def few(self, pool: Sequence[str], count: int) -> list[str]:
        """Distinct ones, in no order; at most as many as there are."""
        return self.sample(pool, min(count, len(pool)))

    def folder(self) -> str:
        """Name of a directory."""
        return f"{self.choice(ADJECTIVES)}-{self.choice(NOUNS)}"

    def output(self, ending: str) -> str:
        """Name of a file that the agent is to write; `stem` and `folder` give none like it."""
        word = self.choice(["answer", "found", "list", "output", "report", "result", "summary"])
        return f"{word}_{self.randint(1, 99)}.{ending}"

    def stem(self, level: int) -> str:
        """A file's name without its ending; with a blank in it now and then on higher levels."""
        blank = " " if level >= 3 and self.random() < 0.25 else "_"
        return f"{self.choice(ADJECTIVES)}{blank}{self.choice(NOUNS)}"

    def lines(self, count: int) -> list[str]:
        """Lines of words."""
        return [" ".join(self.choices(NOUNS, k=self.randint(3, 8))) for _ in range(count)]

    def text(self, count: int) -> str:
        return "".join(f"{line}\n" for line in self.lines(count))

    def folders(self, root: str, level: int) -> list[str]:
        """`root` and directories below it: more and deeper ones on higher levels."""
        made = [root]
        for _ in range(level):
            parent = self.choice(made)
            if parent.count("/") < 1 + level:
                made.append(f"{parent}/{self.choice(NOUNS)}")
        if level >= 4:
            made.append(f"{self.choice(made)}/.{self.choice(NOUNS)}")
        return list(dict.fromkeys(made))

    def paths(self, root: str, level: int, endings: Sequence[str]) -> list[str]:
        """Distinct paths of files below `root`; the first of `endings` has two at least."""
        folders = self.folders(root, level)
        made: list[str] = []
        count = 4 + 4 * level
        while len(made) < count:
            ending = endings[0] if len(made) < 2 else self.choice(endings)
            path = f"{self.choice(folders)}/{self.stem(level)}.{ending}"
            if path not in made:
                made.append(path)
        return made


def digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def quoted(path: str) -> str:
    """A name as instructions write it."""
    return f"`{path}`"
