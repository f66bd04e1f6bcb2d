"""What the doctor reads, what it concludes, and that it works where nothing is installed."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from hpc.cgroups import GroupPlace
from hpc.container import FIXES, Features, Runtime
from hpc.container_probe import probe
from hpc.doctor import Finding, Severity, diagnose, judge
from hpc.doctor_facts import (
    Facts,
    FileSystem,
    Partition,
    file_system,
    mount_type,
    partitions,
    session_mib,
    slurm_config,
)
from hpc.doctor_site import site_profile, walltime_minutes
from hpc.isolation import Feature

ALL = frozenset(Feature)
SCRATCH = FileSystem(path="/local", kind="xfs", free_bytes=500 << 30, flock=True, writable=True)
HEALTHY = Facts(
    slurm_version=(23, 11),
    slurm_config={
        "MaxArraySize": "1001", "AccountingStorageType": "accounting_storage/slurmdbd",
        "PreemptMode": "REQUEUE", "JobRequeue": "1", "ProctrackType": "proctrack/cgroup",
        "SelectType": "select/cons_tres",
    },
    partitions=(
        Partition(name="cpu", walltime="2-00:00:00", num_cpus=64, memory_mib=256000, gres="",
                  is_default=True),
        Partition(name="gpu", walltime="1-00:00:00", num_cpus=96, memory_mib=1000000,
                  gres="gpu:h100:8(S:0-1)", is_default=False),
    ),
    sacct_works=True,
    features=Features(
        runtime=Runtime(flavour="apptainer", path="/usr/bin/apptainer", version=(1, 4, 0),
                        version_text="1.4.0"),
        container=ALL, bubblewrap="/usr/bin/bwrap", bubblewrap_version=(0, 11, 0),
        bubblewrap_features=ALL, kernel=(6, 1),
        groups=GroupPlace(version=2, directories=(Path("/sys/fs/cgroup/user"),)),
    ),
    max_user_namespaces=15000, max_net_namespaces=15000, apparmor_restricts_userns=False,
    subuid=True, fuse_writable=True, helpers=("squashfuse", "fuse-overlayfs", "newuidmap"),
    session_mib=2048, cgroup="v2", file_systems=(SCRATCH,),
    gpus=("NVIDIA H100", "NVIDIA H100"), driver="570.1", user="ada", is_root=False,
)  # fmt: skip


def found(name: str, **changes: object) -> Finding:
    facts = dataclasses.replace(HEALTHY, **changes)
    (finding,) = [entry for entry in judge(facts) if entry.name == name]
    return finding


def slurm(**changes: str) -> dict[str, dict[str, str]]:
    return {"slurm_config": HEALTHY.slurm_config | changes}


def test_a_healthy_site_asks_for_nothing() -> None:
    findings = judge(HEALTHY)
    assert [entry for entry in findings if entry.severity is not Severity.good] == []
    assert [entry.fix for entry in findings if entry.fix] == []
    assert found("GPU").value == "2 x NVIDIA H100; driver 570.1"
    assert "gpus_per_node" in found("GPUs in Slurm").meaning


@pytest.mark.parametrize("missing", [name for name in Feature if name is not Feature.container])
def test_missing_isolation_is_a_problem_with_its_fix(missing: Feature) -> None:
    weaker = dataclasses.replace(HEALTHY.features, container=ALL - {missing})
    finding = found(f"isolation: {missing}", features=weaker)
    assert finding.severity is Severity.problem
    assert finding.fix == FIXES[missing]
    assert f"accept_missing=[{missing}]" in finding.meaning


@pytest.mark.parametrize(
    ("name", "changes", "severity", "fix"),
    [
        ("slurm", {"slurm_version": None}, Severity.note, "module load"),
        ("slurm", {"slurm_version": (19, 5)}, Severity.problem, "20.11"),
        ("slurm configuration", {"slurm_config": {}}, Severity.problem, "slurmctld"),
        ("MaxArraySize", slurm(MaxArraySize="64"), Severity.note, "MaxArraySize=1001"),
        ("accounting", {"sacct_works": False}, Severity.note, "slurmdbd"),
        ("preemption", slurm(PreemptMode="CANCEL"), Severity.note, "PreemptMode=REQUEUE"),
        ("preemption", slurm(JobRequeue="0"), Severity.note, "JobRequeue=1"),
        ("ProctrackType", slurm(ProctrackType="proctrack/linuxproc"), Severity.note, "cgroup"),
        ("user.max_user_namespaces", {"max_user_namespaces": 0}, Severity.problem, "sysctl"),
        ("user.max_net_namespaces", {"max_net_namespaces": 10}, Severity.problem, "sysctl"),
        ("AppArmor", {"apparmor_restricts_userns": True}, Severity.note, "profiles"),
        ("SIF mounts", {"fuse_writable": False}, Severity.note, "chmod 666 /dev/fuse"),
        ("subuid", {"subuid": False}, Severity.note, "usermod --add-subuids"),
        ("GPU", {"gpus": ()}, Severity.note, ""),
        ("user", {"is_root": True}, Severity.note, "ordinary user"),
    ],
)  # fmt: skip
def test_findings(name: str, changes: dict[str, object], severity: Severity, fix: str) -> None:
    finding = found(name, **changes)
    assert finding.severity is severity
    assert fix in finding.fix
    assert finding.meaning


def test_how_environments_are_limited() -> None:
    assert found("limits of environments").value == "cgroup-v2 below /sys/fs/cgroup/user"
    scope = dataclasses.replace(HEALTHY.features, groups=None, scope_runner="/bin/systemd-run")
    assert found("limits of environments", features=scope).value == "systemd-scope"
    bare = dataclasses.replace(HEALTHY.features, groups=None)
    finding = found("limits of environments", features=bare)
    assert finding.value == "rlimit+watchdog (cgroup v2, not delegated)"
    assert "Delegate=memory pids" in finding.fix
    old = dataclasses.replace(bare, kernel=(4, 18))
    assert found("limits of environments", features=old).value.startswith("watchdog")


def test_a_small_session_directory_matters_only_without_overlay() -> None:
    assert found("sessiondir max size", session_mib=64).severity is Severity.good
    assert "small" not in found("sessiondir max size", session_mib=64).meaning
    without = dataclasses.replace(HEALTHY.features, container=ALL - {Feature.overlay})
    finding = found("sessiondir max size", session_mib=64, features=without)
    assert finding.severity is Severity.note
    assert "1024" in finding.fix


@pytest.mark.parametrize(
    ("changes", "severity", "fix"),
    [
        ({"kind": "nfs4"}, Severity.problem, "node-local"),
        ({"kind": "lustre"}, Severity.problem, "node-local"),
        ({"flock": False}, Severity.problem, "site.scratch"),
        ({"writable": False}, Severity.note, "/local"),
        ({"free_bytes": 1 << 30}, Severity.note, "20 GiB"),
    ],
)
def test_scratch(changes: dict[str, object], severity: Severity, fix: str) -> None:
    scratch = dataclasses.replace(SCRATCH, **changes)
    finding = found("scratch /local", file_systems=(scratch,))
    assert finding.severity is severity
    assert fix in finding.fix


def test_no_runtime_and_a_broken_one() -> None:
    none = Features(runtime=None, container=frozenset(), container_error="not on PATH")
    assert found("container runtime", features=none).fix == FIXES[Feature.container]
    assert found("bubblewrap", features=none).fix.startswith("install")
    broken = dataclasses.replace(none, runtime=HEALTHY.features.runtime)
    finding = found("container runtime", features=broken)
    assert "can't start" in finding.value
    assert "max_user_namespaces" in finding.fix


def test_what_slurm_says_is_read() -> None:
    text = "Configuration data as of 2025\nMaxArraySize           = 1001\nGresTypes = gpu\n\nx\n"
    assert slurm_config(text) == {"MaxArraySize": "1001", "GresTypes": "gpu"}
    read = partitions("cpu*|1:00:00|64|256000+|(null)\ngpu|infinite|48|1000|gpu:a100:4\n"
                      "gpu|infinite|96|2000|gpu:h100:8\nbad line\n")  # fmt: skip
    assert [(entry.name, entry.num_cpus, entry.gres) for entry in read] == [
        ("cpu", 64, ""), ("gpu", 96, "gpu:h100:8")
    ]  # fmt: skip
    assert read[0].is_default
    assert read[0].memory_mib == 256000


def test_other_texts_are_read() -> None:
    assert session_mib("# x\nsessiondir max size = 64\n") == 64
    assert session_mib("") is None
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0\nt /home/a\\040b tmpfs rw 0 0\n"
    assert mount_type(Path("/var"), mounts) == "ext4"
    assert mount_type(Path("/home/ada"), mounts) == "nfs4"
    assert mount_type(Path("/home/a b/c"), mounts) == "tmpfs"
    assert mount_type(Path("/homestead"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("2-00:00:00", 2880), ("1:30:00", 90), ("45:00", 45), ("infinite", None), ("n/a", None)],
)
def test_walltimes(text: str, minutes: int | None) -> None:
    assert walltime_minutes(text) == minutes


def test_the_drafted_profile_is_a_site() -> None:
    profile = yaml.safe_load(site_profile(HEALTHY, name="here"))
    assert profile["slurm_version"] == [23, 11]
    assert profile["placements"]["default"] == {
        "partition": "cpu", "cpus_per_node": 64, "memory_mib": 256000,
        "max_walltime_minutes": 2880,
    }  # fmt: skip
    assert profile["placements"]["learner"]["gpu_type"] == "h100"
    cancelled = dataclasses.replace(HEALTHY, **slurm(PreemptMode="CANCEL"))
    assert "on_preempt: cancel" in site_profile(cancelled, name="here")
    local = yaml.safe_load(
        site_profile(dataclasses.replace(HEALTHY, slurm_version=None), name="it's")
    )
    assert local["backend"] == "local"


def test_a_bare_machine_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("PRORL_APPTAINER", raising=False)
    probe.cache_clear()
    findings = diagnose(paths=[tmp_path / "absent" / "deeper"])
    probe.cache_clear()
    values = {entry.name: entry.value for entry in findings}
    assert values["slurm"] == "none"
    assert values["container runtime"] == "none"
    assert all(entry.meaning for entry in findings)


def test_a_file_systems_facts(tmp_path: Path) -> None:
    facts = file_system(tmp_path)
    assert facts.writable
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
