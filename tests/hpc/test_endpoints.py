"""Publishing and waiting for endpoints."""

from pathlib import Path

import pytest

from hpc import endpoints, ledger
from hpc.endpoints import Endpoint
from hpc.errors import EndpointTimeout
from hpc.prepare import prepare
from hpc.rundir import RunDirectory
from tests.hpc.plans import job, plan, slurm_site


def endpoint(attempt: int, *, run: str = "id-1", host: str = "10.0.0.7") -> Endpoint:
    return Endpoint(
        run=run, role="buffer", host=host, port=1, public_key="k", attempt=attempt, published=1.0
    )


def wait(run: RunDirectory, *, after_attempt: int = 0) -> Endpoint:
    return endpoints.await_endpoint(
        run, "buffer", run_id="id-1", timeout_seconds=0.1, after_attempt=after_attempt
    )


def test_publish_and_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert endpoints.publish(run, endpoint=endpoint(1))
    assert wait(run) == endpoint(1)
    assert endpoint(1).address == "tcp://10.0.0.7:1"
    assert endpoint(1, host="fd00::7").address == "tcp://[fd00::7]:1"


def test_an_older_attempt_never_replaces_its_successor(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    endpoints.publish(run, endpoint=endpoint(2))
    assert not endpoints.publish(run, endpoint=endpoint(1))
    endpoints.withdraw(run, endpoint=endpoint(1))
    assert wait(run) == endpoint(2)
    endpoints.withdraw(run, endpoint=endpoint(2))
    assert endpoints.read(run, "buffer") is None


def test_stale_and_foreign_files_are_not_taken(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    endpoints.publish(run, endpoint=endpoint(1, run="id-0"))
    with pytest.raises(EndpointTimeout):
        wait(run)
    endpoints.publish(run, endpoint=endpoint(1))
    with pytest.raises(EndpointTimeout):
        wait(run, after_attempt=1)


def test_damaged_or_newer_file_is_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    endpoints.publish(run, endpoint=endpoint(1))
    path = run.endpoint("buffer")
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    assert endpoints.read(run, "buffer") is None
    path.write_text("{")
    assert endpoints.read(run, "buffer") is None


def test_the_error_names_the_culprit(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(EndpointTimeout, match="'buffer' after 0 s: its job never started"):
        wait(run)
    started = ledger.Start(
        time=1.0, job="buffer", role="buffer", index=0, attempt=1, job_id="7", host="node-9"
    )
    ledger.append(run.ledger, entry=started)
    with pytest.raises(EndpointTimeout, match="attempt 1 on node-9 hasn't published"):
        wait(run)
    ended = ledger.Exit(
        time=2.0, job="buffer", index=0, attempt=1, code=1, next="failed", reason="exit code 1"
    )
    ledger.append(run.ledger, entry=ended)
    with pytest.raises(EndpointTimeout, match="attempt 1 on node-9 ended: exit code 1"):
        wait(run)


def test_a_role_beside_another_is_looked_for_in_that_ones_job(tmp_path: Path) -> None:
    """As the buffer beside the learner: the ledger never speaks of a job of its own."""
    run = RunDirectory(tmp_path)
    jobs = (job("rollout", array_size=2, after=("learner",)), job("learner"))
    prepare(run, plan=plan(*jobs, directory=run.root), site=slurm_site())
    with pytest.raises(EndpointTimeout, match="the learner job, in which it runs, never started"):
        wait(run)
    started = ledger.Start(
        time=1.0, job="learner", role="learner", index=0, attempt=2, job_id="7", host="node-9"
    )
    ledger.append(run.ledger, entry=started)
    with pytest.raises(EndpointTimeout, match="in the learner job, attempt 2 on node-9 hasn't"):
        wait(run)
    assert endpoints.culprit(run, "rollout").startswith("its job never started")


def test_stopping_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(EndpointTimeout, match="had to stop"):
        endpoints.await_endpoint(
            RunDirectory(tmp_path), "buffer", run_id="x", timeout_seconds=600, stopping=lambda: True
        )


def test_own_address() -> None:
    assert endpoints.own_address(environment={}) == "127.0.0.1"
    in_slurm = {"SLURM_JOB_ID": "1", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
    assert endpoints.own_address(environment=in_slurm)
    assert endpoints.own_address(peer="127.0.0.1", environment=in_slurm)
