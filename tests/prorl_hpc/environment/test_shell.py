"""The suite of checks on the backends that need no image, as whoever runs the tests.

The destructive checks and Apptainer are run by tests/cluster/test_environment.py.
"""

from pathlib import Path

import pytest

from hpc.container_probe import probe
from hpc.isolation import Feature
from prorl_hpc.environment import Backend
from tests.prorl_hpc.environment.checks import CHECKS, ISOLATING, run_check

HEAVY = {"many_at_once", "many_times"}
CASES = [(Backend.process, name) for name in CHECKS]
CASES += [(Backend.bubblewrap, name) for name in CHECKS | ISOLATING if name not in HEAVY]


@pytest.mark.process
@pytest.mark.parametrize(("backend", "name"), CASES, ids=lambda value: str(value))
def test_check(backend: Backend, name: str, tmp_path: Path) -> None:
    wanted = {Feature.container, Feature.pid_namespace, Feature.network_none}
    if backend is Backend.bubblewrap and not wanted <= probe().bubblewrap_features:
        pytest.skip(f"bubblewrap can't isolate here: {probe().bubblewrap_error}")
    function = (CHECKS | ISOLATING)[name]
    run_check(function, backend=backend, image=None, root=tmp_path)
