"""A pytest plugin that runs inside the scoring sandbox: each test's outcome as a signed line.

Copied in as text, so it needs the standard library alone and old Pythons understand it. The key is
in a file that is gone before any of the project's code is loaded; each line is signed together with
its number, so that lines which somebody else adds, changes or takes away are found, and only a
whole session ends with the line `end`. The key stays in this process: code that searches the
interpreter's memory for it is not stopped.
"""

import hmac
import json
import os
from typing import Any


def _teller(path: str, key_path: str) -> Any:
    """Writes rows; holds the key where no attribute and no global leads to it."""
    owner = os.getpid()
    with open(key_path, "rb") as source:  # noqa: PTH123
        key = source.read()
    os.unlink(key_path)  # noqa: PTH108
    stream = open(path, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    number = 0

    def tell(**row: object) -> None:
        nonlocal number
        # a test may fork, and its child end like a session
        if os.getpid() == owner:
            text = json.dumps(row)
            mark = hmac.new(key, f"{number}\t{text}".encode(), "sha256").hexdigest()
            stream.write(f"{text}\t{mark}\n")
            stream.flush()
            number += 1

    return tell


class _Reporter:
    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self._config: Any = None

    def pytest_configure(self, config: Any) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if self._config is not None:
            name = self._config.cwd_relative_nodeid(name)
        outcome = "other" if hasattr(report, "wasxfail") else report.outcome
        self._tell(test=name, when=report.when, outcome=outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(test=report.nodeid, when="collect", outcome="failed")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._tell(end=int(exitstatus))


_path, _key_path = os.environ.pop("PRORL_REPORT", ""), os.environ.pop("PRORL_REPORT_KEY", "")
os.environ.pop("PYTEST_ADDOPTS", None)
if _path and os.path.exists(_key_path):  # noqa: PTH110
    _reporter = _Reporter(_teller(_path, _key_path))
    pytest_configure = _reporter.pytest_configure
    pytest_runtest_logreport = _reporter.pytest_runtest_logreport
    pytest_collectreport = _reporter.pytest_collectreport
    pytest_sessionfinish = _reporter.pytest_sessionfinish
