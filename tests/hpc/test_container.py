"""Command lines and the ladder of isolation: pure, by example."""

import dataclasses
from pathlib import Path

import pytest

from hpc.cgroups import GroupPlace
from hpc.container import (
    Features,
    Launch,
    Runtime,
    bubblewrap_argv,
    container_argv,
    host_environment,
    resolve,
)
from hpc.container_probe import find_runtime, parse_version, probe
from hpc.errors import ImageError, IsolationError
from hpc.isolation import Feature

ALL = frozenset(Feature)
APPTAINER = Runtime(
    flavour="apptainer", path="/usr/bin/apptainer", version=(1, 4, 5), version_text="1.4.5"
)
SINGULARITY = Runtime(
    flavour="singularity", path="/usr/bin/singularity", version=(3, 11, 4), version_text="3.11.4"
)
LAUNCH = Launch(
    image=Path("/images/a b.sif"),
    layer=Path("/scratch/layer"),
    binds=[(Path("/scratch/in"), "/in", False), (Path("/scratch/out"), "/out", True)],
    token="t-1",
    command=["bash", "-c", "true"],
)


def features(have: frozenset[Feature] = ALL, **changes: object) -> Features:
    found = Features(
        runtime=APPTAINER, container=have, container_error="it said no", bubblewrap="/bin/bwrap",
        bubblewrap_version=(0, 8, 0), bubblewrap_features=have - {Feature.overlay},
        bubblewrap_error="", kernel=(6, 1),
    )  # fmt: skip
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "flavour", "version", "supported"),
    [
        ("apptainer version 1.4.5", "apptainer", (1, 4, 5), True),
        ("apptainer version 1.1.9-1.el8\n", "apptainer", (1, 1, 9), False),
        ("singularity-ce version 4.1.0-jammy", "singularity", (4, 1, 0), True),
        ("singularity version 3.8.7", "singularity", (3, 8, 7), False),
    ],
)
def test_versions(text: str, flavour: str, version: tuple[int, ...], supported: bool) -> None:
    runtime = parse_version(text, path="/x")
    assert runtime is not None
    assert (runtime.flavour, runtime.version, runtime.is_supported) == (flavour, version, supported)


def test_other_programs_are_no_runtime() -> None:
    assert parse_version("docker version 27", path="/x") is None
    assert find_runtime("/bin/true") is None
    assert find_runtime("/nonexistent/apptainer") is None


def test_every_isolation_is_spelled_out() -> None:
    assert container_argv(APPTAINER, LAUNCH, features=ALL) == [
        "/usr/bin/apptainer", "-s", "exec", "--contain", "--ipc", "--cleanenv", "--no-home",
        "--no-mount", "tmp,bind-paths", "--userns", "--pid", "--net", "--network", "none",
        "--overlay", "/scratch/layer", "--bind", "/scratch/in:/in:ro",
        "--bind", "/scratch/out:/out:rw", "--env", "PRORL_SANDBOX=t-1", "--cwd", "/",
        "/images/a b.sif", "bash", "-c", "true",
    ]  # fmt: skip


def test_singularity_spells_the_directory_its_own_way() -> None:
    argv = container_argv(SINGULARITY, LAUNCH, features=ALL)
    assert argv[argv.index("--pwd") + 1] == "/"
    assert "--cwd" not in argv


@pytest.mark.parametrize(
    ("missing", "flag"),
    [
        (Feature.user_namespace, "--userns"),
        (Feature.pid_namespace, "--pid"),
        (Feature.network_none, "--network"),
        (Feature.overlay, "--overlay"),
    ],
)
def test_missing_features_are_left_out(missing: Feature, flag: str) -> None:
    argv = container_argv(APPTAINER, LAUNCH, features=ALL - {missing})
    assert flag not in argv
    assert ("--writable-tmpfs" in argv) == (missing is Feature.overlay)


def test_paths_that_bind_cannot_spell_are_refused() -> None:
    bad = Launch(image=LAUNCH.image, layer=Path("/a:b"), binds=(), token="t", command=["true"])
    with pytest.raises(ValueError, match="':' or ','"):
        container_argv(APPTAINER, bad, features=ALL)
    none = Launch(image=None, layer=Path("/a"), binds=(), token="t", command=["true"])
    with pytest.raises(ImageError, match="needs an image"):
        container_argv(APPTAINER, none, features=ALL)


def test_bubblewrap_over_the_host_shows_no_home() -> None:
    launch = Launch(image=None, layer=Path("/layer"), binds=(), token="t", command=["true"])
    argv = bubblewrap_argv("bwrap", launch, features=ALL - {Feature.overlay})
    assert {"--unshare-pid", "--unshare-net", "--die-with-parent", "--new-session"} <= set(argv)
    assert "/home" not in argv
    assert "/etc/shadow" not in argv
    assert argv[-1] == "true"


def test_bubblewrap_with_an_overlay(tmp_path: Path) -> None:
    launch = Launch(image=tmp_path, layer=Path("/layer"), binds=(), token="t", command=["true"])
    argv = bubblewrap_argv("bwrap", launch, features=ALL)
    at = argv.index("--overlay-src")
    assert argv[at : at + 6] == [
        "--overlay-src", str(tmp_path), "--overlay", "/layer/upper", "/layer/work", "/",
    ]  # fmt: skip


def test_nothing_of_the_users_environment_reaches_the_runtime() -> None:
    base = {"PATH": "/bin", "APPTAINER_BIND": "/", "SINGULARITYENV_X": "1", "KEY": "secret"}
    kept = host_environment(Path("/scratch"), base=base)
    assert kept["PATH"] == "/bin"
    assert not {"APPTAINER_BIND", "SINGULARITYENV_X", "KEY"} & set(kept)


def test_full_isolation_is_recorded() -> None:
    have, isolation = resolve(features(), backend="apptainer")
    assert have == ALL
    assert isolation.is_full
    assert isolation.to_json() == {
        "backend": "apptainer", "runtime_version": "1.4.5", "user_namespace": True,
        "pid_namespace": True, "network_none": True, "own_root": True,
        "writable_layer": "overlay", "memory_limit": "rlimit+watchdog",
        "process_limit": "rlimit+watchdog", "overridden": [], "format": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        (Feature.user_namespace, "max_user_namespaces"),
        (Feature.pid_namespace, "allow pid ns"),
        (Feature.network_none, "max_net_namespaces"),
        (Feature.overlay, "enable overlay"),
    ],
)
def test_a_missing_feature_is_refused_with_its_fix_or_recorded(missing: Feature, fix: str) -> None:
    site = features(ALL - {missing})
    with pytest.raises(IsolationError, match=fix) as caught:
        resolve(site, backend="apptainer")
    assert "it said no" in str(caught.value)
    assert f"accept_missing=[{missing}]" in str(caught.value)
    _, isolation = resolve(site, backend="apptainer", accept_missing=frozenset({missing}))
    assert isolation.overridden == (missing,)
    assert not isolation.is_full


@pytest.mark.parametrize("backend", ["apptainer", "bubblewrap"])
def test_a_machine_without_containers_is_refused_whatever_is_accepted(backend: str) -> None:
    nothing: frozenset[Feature] = frozenset()
    stuck = features(container=nothing, bubblewrap_features=nothing, bubblewrap="/usr/bin/bwrap")
    with pytest.raises(IsolationError, match=r"sysctl user\.max_user_namespaces") as caught:
        resolve(stuck, backend=backend, accept_missing=ALL)
    assert "accept_missing" not in str(caught.value)
    absent = features(
        container=nothing, bubblewrap_features=nothing, bubblewrap=None, runtime=None
    )  # fmt: skip
    with pytest.raises(IsolationError, match="install Apptainer"):
        resolve(absent, backend=backend, accept_missing=ALL)


def test_without_overlay_and_memory_layer_directories_are_copied(tmp_path: Path) -> None:
    weaker = features(container=ALL - {Feature.overlay}, tmpfs_layer=False)
    have, isolation = resolve(
        weaker, backend="apptainer", accept_missing=frozenset({Feature.overlay})
    )
    assert isolation.writable_layer == "copied-directories"
    assert weaker.runtime is not None
    launch = Launch(
        image=tmp_path, layer=Path("/l"), binds=(), token="t", command=["true"],
        writable=["/testbed"],
    )  # fmt: skip
    argv = container_argv(weaker.runtime, launch, features=have, tmpfs=False)
    assert "--writable-tmpfs" not in argv
    assert {"/l/tmp:/tmp:rw", "/l/testbed:/testbed:rw"} <= set(argv)


def test_what_bounds_memory_and_processes_is_recorded() -> None:
    place = GroupPlace(version=2, directories=(Path("/g"),))
    _, grouped = resolve(features(groups=place), backend="apptainer")
    assert grouped.memory_limit == grouped.process_limit == "cgroup-v2+rlimit+watchdog"
    _, scoped = resolve(features(scope_runner="systemd-run", kernel=(4, 18)), backend="apptainer")
    assert scoped.memory_limit == "systemd-scope+rlimit+watchdog"
    assert scoped.process_limit == "systemd-scope+watchdog"


def test_plain_processes_need_the_explicit_override() -> None:
    with pytest.raises(IsolationError, match="container"):
        resolve(features(), backend="process")
    _, isolation = resolve(
        features(), backend="process", accept_missing=frozenset({Feature.container})
    )
    assert isolation.backend == "process"
    assert not isolation.own_root
    assert set(isolation.overridden) == ALL


def test_old_bubblewrap_copies_instead_of_an_overlay() -> None:
    _, isolation = resolve(features(), backend="bubblewrap")
    assert isolation.writable_layer == "copied-directories"
    assert isolation.is_full


def test_old_kernels_count_the_users_processes_machine_wide() -> None:
    _, isolation = resolve(features(kernel=(4, 18)), backend="apptainer")
    assert isolation.process_limit == "watchdog"


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A runtime that runs what it is asked on the host, and refuses one network as sites do."""
    script = tmp_path / "apptainer"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo apptainer version 1.3.0; exit; }\n'
        'for word; do [ "$word" = none ] && { echo "FATAL: no network none" >&2; exit 1; }; done\n'
        "echo pid:[1] net:[1] user:[1] written\n"
    )
    script.chmod(0o755)
    probe.cache_clear()
    return str(script)


def test_probe_finds_the_feature_that_fails(refusing: str) -> None:
    found = probe(refusing)
    assert found.runtime is not None
    assert found.runtime.version == (1, 3, 0)
    assert found.container == ALL - {Feature.network_none}
    assert found.container_error == "FATAL: no network none"
    with pytest.raises(IsolationError, match="FATAL: no network none"):
        resolve(found, backend="apptainer")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("pid", Feature.pid_namespace), ("net", Feature.network_none), ("written", Feature.overlay)],
)
def test_what_is_left_out_without_a_word_isnt_had(
    refusing: str, kind: str, missing: Feature
) -> None:
    """`allow pid ns = no` makes --pid mean nothing: the command runs, and well."""
    script = Path(refusing)
    own = f"{kind}:[$(readlink /proc/self/ns/{kind} | tr -dc 0-9)]" if kind != "written" else ""
    words = {"pid": "pid:[1]", "net": "net:[1]", "user": "user:[1]", "written": "written"}
    words[kind] = own
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo apptainer version 1.3.0; exit; }\n'
        f"echo {' '.join(words.values())}\n"
    )
    probe.cache_clear()
    found = probe(refusing)
    probe.cache_clear()
    assert found.container == ALL - {missing}
    assert f"{missing} was asked for and not given" in found.container_error


def test_probe_without_any_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PRORL_APPTAINER", raising=False)
    probe.cache_clear()
    found = probe()
    probe.cache_clear()
    assert found.runtime is None
    assert found.container == frozenset()
    assert "neither apptainer nor singularity" in found.container_error
    assert found.bubblewrap_features == frozenset()
