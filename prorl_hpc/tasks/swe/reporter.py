"""A pytest plugin that runs inside the scoring sandbox: each test's outcome as a line of JSON.

Copied in as text, so it needs the standard library alone and old Pythons understand it. What tests
print can't be taken for an outcome: the lines go to a file that was opened before any of the
project's code is loaded, and only a whole session ends with the line `end`.
"""

import json
import os
from typing import Any


class _Reporter:
    def __init__(self, path: str) -> None:
        self._owner = os.getpid()
        self._stream = open(path, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        self._config: Any = None

    def tell(self, **row: object) -> None:
        # a test may fork, and its child end like a session
        if os.getpid() == self._owner:
            self._stream.write(json.dumps(row) + "\n")
            self._stream.flush()

    def pytest_configure(self, config: Any) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if self._config is not None:
            name = self._config.cwd_relative_nodeid(name)
        outcome = "other" if hasattr(report, "wasxfail") else report.outcome
        self.tell(test=name, when=report.when, outcome=outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tell(test=report.nodeid, when="collect", outcome="failed")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.tell(end=int(exitstatus))


_path = os.environ.pop("PRORL_REPORT", "")
os.environ.pop("PYTEST_ADDOPTS", None)
if _path:
    _reporter = _Reporter(_path)
    pytest_configure = _reporter.pytest_configure
    pytest_runtest_logreport = _reporter.pytest_runtest_logreport
    pytest_collectreport = _reporter.pytest_collectreport
    pytest_sessionfinish = _reporter.pytest_sessionfinish
