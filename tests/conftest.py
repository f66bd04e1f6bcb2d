"""What every test relies on: one thread per process, no network, no foreign cluster."""

import os
import re
import signal

import pytest
from hypothesis import HealthCheck, settings

# Before torch or tokenizers are imported by any test module.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in [n for n in os.environ if re.match(r"(SLURM|SBATCH|SRUN|APPTAINER|SINGULARITY)_", n)]:
    del os.environ[name]

# A loaded machine is no reason to fail: no bound on an example's time, none on making it.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

FIXTURE_MARKERS = {
    "cluster": "cluster",
    "cluster_with_accounting": "cluster",
    "apptainer": "container",
}


def pytest_configure() -> None:
    # Asked to end, pytest still runs the fixtures' teardown: daemons never outlive their tests.
    # Forked children keep the usual meaning of the signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in FIXTURE_MARKERS:
                item.add_marker(FIXTURE_MARKERS[fixture])
