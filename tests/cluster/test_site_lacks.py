"""Sites that lack namespaces or overlays, as the kernel and the runtime's own configuration make
them: limits of a user namespace around the test, and a copy of apptainer.conf. Nothing is faked.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.process]

SCRIPT = Path(__file__).resolve().with_name("site_steps.py")
# the limit is set with the namespace's capabilities, which are then given away for good
LIMITED = (
    "echo 0 >/proc/sys/user/{name} && exec setpriv --inh-caps=-all --ambient-caps=-all "
    '--bounding-set=-all --no-new-privs "$@"'
)


def told(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def without(apptainer: Any, limit: str, *arguments: str) -> dict[str, Any]:
    """Runs the steps where the kernel makes no more namespaces of that kind."""
    unshare = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c"]
    argv = [*unshare, LIMITED.format(name=limit), "sh", "python", "-B", str(SCRIPT), *arguments]
    tried = apptainer.user.run([*unshare, LIMITED.format(name=limit), "sh", "true"])
    if tried.returncode != 0:
        pytest.skip(f"the kernel's limits can't be set here: {tried.stderr.strip()[-200:]}")
    return told(apptainer.user.run(argv))


@pytest.mark.parametrize("backend", ["apptainer", "bubblewrap"])
def test_no_network_namespaces(apptainer: Any, backend: str) -> None:
    image = str(apptainer.rootfs)
    refused = without(apptainer, "max_net_namespaces", backend, image)["refused"]
    assert "network_none is not to be had" in refused
    assert "user.max_net_namespaces=15000" in refused
    assert "max_" in refused.split("(")[1], "the kernel's own words"
    weaker = without(apptainer, "max_net_namespaces", backend, image, "network_none")
    assert weaker["isolation"]["overridden"] == ["network_none"]
    assert weaker["isolation"]["network_none"] is False
    # it really shares the machine's network: the record is the truth
    assert weaker["said"] == ["ran", str(Path("/proc/self/ns/net").readlink())]


@pytest.mark.parametrize("backend", ["apptainer", "bubblewrap"])
def test_no_user_namespaces_can_not_be_accepted(apptainer: Any, backend: str) -> None:
    image = str(apptainer.rootfs)
    everything = ["user_namespace", "pid_namespace", "network_none", "overlay"]
    for accepted in ([], everything):
        refused = without(apptainer, "max_user_namespaces", backend, image, *accepted)["refused"]
        assert "container is not to be had" in refused
        assert "sysctl user.max_user_namespaces=15000" in refused
        assert "accept_missing" not in refused, "there is nothing to accept"


@pytest.mark.parametrize(
    ("setting", "feature", "layer"),
    [
        ("enable overlay", "overlay", "copied-directories"),
        ("allow pid ns", "pid_namespace", "overlay"),
    ],
)
def test_what_the_configuration_forbids(
    apptainer: Any, setting: str, feature: str, layer: str
) -> None:
    """The real runtime with the site's configuration: `enable overlay = no` forbids layers in
    memory too, and `allow pid ns = no` makes --pid mean nothing without a word."""
    conf = Path("/etc/apptainer/apptainer.conf")
    if not conf.is_file():
        pytest.skip(f"{conf} isn't there")
    where = apptainer.user.new_directory("site")
    lines = [
        f"{setting} = no" if line.startswith(f"{setting} = ") else line
        for line in conf.read_text().splitlines()
    ]
    front = where / "apptainer"
    for path, text in (
        (where / "apptainer.conf", "\n".join(lines) + "\n"),
        (front, f'#!/bin/sh\nexec {apptainer.command} -c {where}/apptainer.conf "$@"\n'),
    ):
        code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
        assert apptainer.user.run(["python", "-c", code, str(path), text]).returncode == 0
    apptainer.user.run(["chmod", "755", str(front)])
    steps = ["python", "-B", str(SCRIPT), "apptainer", str(apptainer.rootfs)]
    env = {"PRORL_APPTAINER": str(front)}
    refused = told(apptainer.user.run(steps, env=env))["refused"]
    assert f"{feature} is not to be had" in refused
    assert f"'{setting} = yes' in apptainer.conf" in refused
    weaker = told(apptainer.user.run([*steps, feature], env=env))
    assert weaker["isolation"]["overridden"] == [feature]
    assert "ran" in weaker["said"]
    assert weaker["isolation"]["writable_layer"] == layer
