"""Shell problems for tests of real sandboxes: a row with scripts, all families in few problems."""

from pathlib import Path
from typing import Any

from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.cli.dice import Dice
from prorl_hpc.tasks.cli.made import FAMILIES, finished, joined
from prorl_hpc.tasks.cli.problem import CliProblem
from prorl_hpc.tasks.cli.task import CliTask, make_cli

SECRET = "expected-" + "7f" * 20
"""In the verifier's files alone."""

ROW = {
    "id": "double", "instruction": "Write {twice} every line of a.txt to b.txt, with ./run.sh.",
    "files": {"a.txt": "x\ny\n", "run.sh": {"text": "cat a.txt a.txt | sort\n", "mode": "755"}},
    "setup": "mkdir -p deep/er && echo made > deep/er/by-setup",
    "checks": [
        {"check": "text", "path": "a.txt", "text": "x\ny", "guard": True},
        {"check": "exists", "path": "deep/er/by-setup", "guard": True},
    ],
    "verify": {
        "same": f"grep -q {SECRET} $VERIFY/note && cd $VERIFY && diff $OLDPWD/b.txt b.txt",
        "parsed": "python3 -c 'import json, sys; sys.exit(not open(\"b.txt\").read())'",
    },
    "verify_files": {"b.txt": "x\nx\ny\ny\n", "note": SECRET},
    "solution": "./run.sh > b.txt",
}  # fmt: skip
OTHER = ROW | {"id": "other", "instruction": "Another one."}


class EveryFamily:
    """A source of problems that hold four families each, until all have been there."""

    def __init__(self) -> None:
        names = list(FAMILIES)
        self._chosen = [names[start : start + 4] for start in range(0, len(names), 4)]

    def size(self, kind: Kind) -> int:
        return len(self._chosen)

    def problem(self, index: int, *, kind: Kind) -> CliProblem:
        dice = Dice(index)
        names = self._chosen[index]
        return finished(joined([FAMILIES[name](dice, 4) for name in names]), family="+".join(names))


def all_families(environment: EnvironmentKind, *, image: Path | None = None) -> CliTask:
    """Needs no data."""
    options: dict[str, Any] = {"image": str(image)} if image is not None else {}
    config = TaskConfig(
        kind="cli", environment=environment, agent=AgentKind.bash, max_turns=9, options=options
    )
    made = make_cli("cli", config, 0)
    return CliTask("cli", made.settings, EveryFamily())
