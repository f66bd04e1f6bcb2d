"""A process that dies at the n-th thing it does to the file system, and does nothing after."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hpc import files

PLACES: tuple[tuple[Any, str], ...] = (
    (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (Path, "write_bytes"),
    (shutil, "rmtree"), (os, "fsync"), (files, "_exchange"),
)  # fmt: skip


class Died(BaseException):
    """The process is gone: no handler of the code under test gets to do anything."""


@contextmanager
def dying(after: int) -> Iterator[Callable[[], bool]]:
    """Within the block, call number `after` (from 0) and all later ones raise `Died`.

    The value says whether it came to that.
    """
    calls = 0

    def wrap(real: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise Died
            return real(*args, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in PLACES:
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield lambda: calls > after


def each_death(body: Callable[[], None], check: Callable[[], None]) -> int:
    """Runs `body` again and again, dying one step later each time; `check` after each death.

    How many deaths there were until it lived through.
    """
    deaths = 0
    while True:
        with dying(deaths) as died:
            with suppress(Died):
                body()
            over = not died()
        check()
        if over:
            return deaths
        deaths += 1
