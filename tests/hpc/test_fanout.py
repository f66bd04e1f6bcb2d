"""A function over several arguments, on this machine."""

import os
import signal
from pathlib import Path

import pytest

from hpc.errors import FanoutError, SiteError
from hpc.fanout import Done, Failed, fan_out
from tests.hpc.plans import local_site, resources, slurm_site

pytestmark = pytest.mark.process


def double(number: int) -> int:
    if number == 2:
        raise ValueError("two is\nnot liked")
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_results_and_failures_keep_their_order(tmp_path: Path) -> None:
    found = fan_out(
        double,
        [1, 2, 3, 4],
        site=local_site(),
        role="evaluation",
        resources=resources(),
        directory=tmp_path / "it's here",
        at_once=2,
        timeout_seconds=500,
    )
    assert found[0] == Done(value=2)
    assert found[3] == Done(value=8)
    raised, killed = found[1:3]
    assert isinstance(raised, Failed)
    assert raised.error == "ValueError: two is not liked"
    assert isinstance(killed, Failed)
    assert "was lost" in killed.error


def test_what_can_not_be_fanned_out(tmp_path: Path) -> None:
    given = {"site": slurm_site(), "role": "x", "directory": tmp_path, "timeout_seconds": 1.0}
    with pytest.raises(FanoutError, match="at_once=0"):
        fan_out(double, [1], resources=resources(), at_once=0, **given)  # type: ignore[arg-type]
    with pytest.raises(SiteError, match="nodes=2"):
        fan_out(double, [1], resources=resources(nodes=2), at_once=1, **given)  # type: ignore[arg-type]
