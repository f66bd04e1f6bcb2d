"""One rank of a test's learner: `python -m tests.prorl_hpc.learner.rank RUN STOP_AFTER`.

The rank that TEST_BLIND_RANK names can't read back what it has written of a checkpoint.
TEST_NUM_ROLLOUTS is the size of a group.
"""

import errno
import os
import sys
from pathlib import Path

from prorl_hpc.learner import checkpoint, session
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

VOCABULARY = 15


def blind(path: Path) -> str:
    raise OSError(errno.EIO, "Input/output error", str(path))


def main() -> None:
    if os.environ.get("TEST_BLIND_RANK") == os.environ.get("RANK"):
        checkpoint.hash_file = blind
    left = iter(range(int(sys.argv[2])))
    rollouts = int(os.environ.get("TEST_NUM_ROLLOUTS", "4"))
    fake = FakeClient(vocabulary=VOCABULARY, num_rollouts=rollouts)
    reason = session.train(
        Run(Path(sys.argv[1])),
        connect=lambda patience_seconds: fake,
        read=fake.read,
        stop_reason=lambda: None if next(left, None) is not None else "stopped by the test",
    )
    print(reason)


if __name__ == "__main__":
    main()
