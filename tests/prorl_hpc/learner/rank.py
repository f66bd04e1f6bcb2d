"""One rank of a test's learner: `python -m tests.prorl_hpc.learner.rank RUN STOP_AFTER`."""

import sys
from pathlib import Path

from prorl_hpc.learner import session
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

VOCABULARY = 15


def main() -> None:
    left = iter(range(int(sys.argv[2])))
    fake = FakeClient(vocabulary=VOCABULARY)
    reason = session.train(
        Run(Path(sys.argv[1])),
        connect=lambda patience_seconds: fake,
        read=fake.read,
        stop_reason=lambda: None if next(left, None) is not None else "stopped by the test",
    )
    print(reason)


if __name__ == "__main__":
    main()
