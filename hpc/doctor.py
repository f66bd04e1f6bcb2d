"""What this machine or cluster can do, what that means for a run, and what to ask the admin for.

`judge` is pure over facts that `hpc.doctor_facts` gathers; `diagnose` does both. Starts no job and
changes nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hpc.container import FIXES, Features
from hpc.doctor_facts import Facts, FileSystem, gather
from hpc.isolation import Feature

SESSION_MIB_ENOUGH = 1024
SCRATCH_BYTES_ENOUGH = 20 << 30
SHARED_KINDS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "panfs", "wekafs")


class Severity(StrEnum):
    """How much a finding matters."""

    good = "good"
    note = "note"
    """Works, with less."""
    problem = "problem"
    """A run that needs it will be refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fact and its consequence."""

    name: str
    value: str
    meaning: str
    fix: str = ""
    """The exact change to ask the admin for; empty when nothing is to be done."""
    severity: Severity = Severity.good


def diagnose(*, paths: Sequence[Path] = ()) -> list[Finding]:
    """Gathers and judges; works with neither Slurm nor a container runtime."""
    return judge(gather(paths=paths))


def judge(facts: Facts) -> list[Finding]:
    """The findings, in the order in which a reader wants them."""
    return [
        *_slurm(facts), *_containers(facts.features), *_kernel(facts), *_runtime_files(facts),
        _limits(facts), *(_file_system(entry, first=index == 0)
                            for index, entry in enumerate(facts.file_systems)),
        _gpus(facts), *_identity(facts),
    ]  # fmt: skip


# --- Slurm ---


def _slurm(facts: Facts) -> list[Finding]:
    if facts.slurm_version is None:
        return [Finding(
            name="slurm", value="none", severity=Severity.note,
            meaning="runs use the local backend: the same scripts as processes of this machine",
            fix="on a cluster: put sinfo, sbatch and scontrol on PATH (module load slurm)",
        )]  # fmt: skip
    version = "{}.{:02d}".format(*facts.slurm_version)
    old = facts.slurm_version < (20, 11)
    found = [Finding(
        name="slurm", value=version, severity=Severity.problem if old else Severity.good,
        meaning="older than anything tested" if old else "jobs are submitted with sbatch",
        fix="update Slurm to 20.11 or later" if old else "",
    )]  # fmt: skip
    if not facts.slurm_config:
        found.append(Finding(
            name="slurm configuration", value="not readable", severity=Severity.problem,
            meaning="the controller doesn't answer scontrol here",
            fix="check that slurmctld is up and that this host may talk to it",
        ))  # fmt: skip
        return found
    found += [_arrays(facts), _accounting(facts), _requeue(facts), _tracking(facts), _gres(facts)]
    return found


def max_array_size(facts: Facts) -> int:
    """Slurm's MaxArraySize, or its default where the site doesn't tell."""
    return int(re.sub(r"\D", "", facts.slurm_config.get("MaxArraySize", "")) or 1001)


def _arrays(facts: Facts) -> Finding:
    size = max_array_size(facts)
    return Finding(
        name="MaxArraySize", value=str(size),
        meaning=f"larger arrays are split into chunks of {size}",
        severity=Severity.good if size > 100 else Severity.note,
        fix="" if size > 100 else "MaxArraySize=1001 or more in slurm.conf",
    )  # fmt: skip


def _accounting(facts: Facts) -> Finding:
    storage = facts.slurm_config.get("AccountingStorageType", "unknown")
    if facts.sacct_works:
        return Finding(name="accounting", value=storage, meaning="sacct answers")
    return Finding(
        name="accounting", value=f"{storage}, sacct fails", severity=Severity.note,
        meaning="states come from the run's own ledger; resource use after a job's end is unknown",
        fix="slurmdbd with AccountingStorageType=accounting_storage/slurmdbd",
    )  # fmt: skip


def _requeue(facts: Facts) -> Finding:
    mode = facts.slurm_config.get("PreemptMode", "OFF").upper()
    requeue = facts.slurm_config.get("JobRequeue", "1") != "0"
    value = f"PreemptMode={mode}, JobRequeue={int(requeue)}"
    if "CANCEL" in mode:
        return Finding(
            name="preemption", value=value, severity=Severity.note,
            meaning="a preempted job is cancelled: set on_preempt: cancel, jobs then resubmit "
            "themselves",
            fix="PreemptMode=REQUEUE for the partitions of long runs",
        )  # fmt: skip
    if not requeue:
        return Finding(
            name="preemption", value=value, severity=Severity.note,
            meaning="Slurm requeues nothing by itself; the scripts ask for it with --requeue",
            fix="JobRequeue=1 in slurm.conf",
        )  # fmt: skip
    return Finding(name="preemption", value=value, meaning="preempted jobs are requeued")


def _tracking(facts: Facts) -> Finding:
    track = facts.slurm_config.get("ProctrackType", "unknown")
    if "cgroup" in track:
        return Finding(name="ProctrackType", value=track, meaning="nothing survives its job")
    return Finding(
        name="ProctrackType", value=track, severity=Severity.note,
        meaning="a job that is killed hard may leave container processes; they are found and "
        "ended by the next attempt on that node",
        fix="ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup in slurm.conf",
    )  # fmt: skip


def _gres(facts: Facts) -> Finding:
    types = sorted({entry.gres for entry in facts.partitions if "gpu" in entry.gres})
    if not types:
        return Finding(
            name="GPUs in Slurm", value="none", meaning="no partition offers a gpu GRES",
            severity=Severity.note,
        )  # fmt: skip
    select = facts.slurm_config.get("SelectType", "")
    spelling = "gpus_per_node" if "cons_tres" in select else "gres"
    return Finding(
        name="GPUs in Slurm", value="; ".join(types)[:200],
        meaning=f"gpu_spelling: {spelling} works here (gres does everywhere)",
    )  # fmt: skip


# --- containers ---


def _containers(features: Features) -> list[Finding]:
    runtime = features.runtime
    have = features.container
    if Feature.container in have and runtime is not None:
        value = f"{runtime.flavour} {runtime.version_text}"
        found = [Finding(name="container runtime", value=value, meaning="starts without root")]
        for name in (Feature.user_namespace, Feature.pid_namespace, Feature.network_none,
                     Feature.overlay):  # fmt: skip
            missing = name not in have
            found.append(Finding(
                name=f"isolation: {name}", value="no" if missing else "yes",
                meaning=f"refused unless accept_missing=[{name}], which trajectories record"
                if missing else "tried and works",
                fix=FIXES[name] if missing else "",
                severity=Severity.problem if missing else Severity.good,
            ))  # fmt: skip
    else:
        found = [Finding(
            name="container runtime",
            value=f"{runtime.flavour} {runtime.version_text} can't start" if runtime else "none",
            meaning=f"tasks that need a container are refused ({features.container_error})",
            fix=FIXES[Feature.user_namespace] if runtime else FIXES[Feature.container],
            severity=Severity.problem,
        )]  # fmt: skip
    found.append(_bubblewrap(features))
    return found


def _bubblewrap(features: Features) -> Finding:
    if Feature.container in features.bubblewrap_features:
        version = ".".join(map(str, features.bubblewrap_version))
        layer = Feature.overlay in features.bubblewrap_features
        how = "writable layer by overlay" if layer else "directories are copied to be writable"
        return Finding(
            name="bubblewrap", value=version, meaning=f"environment=bubblewrap works; {how}"
        )
    return Finding(
        name="bubblewrap", value="none", severity=Severity.note,
        meaning=f"environment=bubblewrap isn't offered ({features.bubblewrap_error})",
        fix="install the package bubblewrap (>= 0.8)",
    )  # fmt: skip


def _kernel(facts: Facts) -> list[Finding]:
    found = []
    for name, number, feature in (
        ("user.max_user_namespaces", facts.max_user_namespaces, Feature.user_namespace),
        ("user.max_net_namespaces", facts.max_net_namespaces, Feature.network_none),
    ):
        few = number is not None and number < 256
        found.append(Finding(
            name=name, value="unknown" if number is None else str(number),
            meaning="fewer environments than a node can run" if few else "enough environments",
            fix=FIXES[feature] if few else "",
            severity=Severity.problem if few else Severity.good,
        ))  # fmt: skip
    if facts.apparmor_restricts_userns:
        found.append(Finding(
            name="AppArmor", value="restricts user namespaces", severity=Severity.note,
            meaning="only programs with a profile may open user namespaces",
            fix="kernel.apparmor_restrict_unprivileged_userns=0, or profiles with `userns,` for "
            "apptainer and bwrap",
        ))  # fmt: skip
    return found


def _runtime_files(facts: Facts) -> list[Finding]:
    squash = "squashfuse" in facts.helpers
    sif = facts.fuse_writable and squash
    found = [
        Finding(
            name="SIF mounts", value=f"/dev/fuse {'writable' if facts.fuse_writable else 'closed'}"
            f", squashfuse {'found' if squash else 'not on PATH'}",
            meaning="SIF files are mounted" if sif else "SIF files may have to be unpacked first",
            fix="" if sif else "chmod 666 /dev/fuse; install squashfuse >= 0.5 and fuse-overlayfs",
            severity=Severity.good if sif else Severity.note,
        ),
        Finding(
            name="subuid", value="range" if facts.subuid else "none",
            meaning="images with several owners build as they should" if facts.subuid
            else "builds map one user only; packages that chown may fail in %post",
            fix="" if facts.subuid else f"usermod --add-subuids 100000-165535 --add-subgids "
            f"100000-165535 {facts.user}",
            severity=Severity.good if facts.subuid else Severity.note,
        ),
    ]  # fmt: skip
    if facts.session_mib is not None:
        found.append(_session(facts.session_mib, facts.features))
    return found


def _session(mib: int, features: Features) -> Finding:
    value = f"{mib} MiB"
    if Feature.overlay in features.container:
        return Finding(
            name="sessiondir max size", value=value,
            meaning="isn't used: writable layers are overlays on local disk",
        )  # fmt: skip
    if mib >= SESSION_MIB_ENOUGH:
        return Finding(
            name="sessiondir max size", value=value, meaning="room for small layers in memory"
        )
    return Finding(
        name="sessiondir max size", value=value, severity=Severity.note,
        meaning="without overlay, layers are in memory, and this is too small for most of them",
        fix=f"sessiondir max size = {SESSION_MIB_ENOUGH} in apptainer.conf",
    )  # fmt: skip


def _limits(facts: Facts) -> Finding:
    features = facts.features
    own_count = features.kernel >= (5, 14)
    if features.limiter:
        where = f" below {features.groups.directories[0]}" if features.groups else ""
        return Finding(
            name="limits of environments", value=f"{features.limiter}{where}",
            meaning="the kernel bounds memory and processes of each environment as a whole",
        )  # fmt: skip
    return Finding(
        name="limits of environments",
        value=f"{'rlimit+' if own_count else ''}watchdog (cgroup {facts.cgroup}, not delegated)",
        severity=Severity.note,
        meaning="memory is bounded per process by rlimits, and over all processes by a watchdog "
        "that looks three times a second: a sudden burst can exceed it for that long",
        fix="delegation of the cgroup controllers memory and pids (systemd: Delegate=memory pids "
        "for user@.service, and loginctl enable-linger for users who run without a session)",
    )  # fmt: skip


def _file_system(entry: FileSystem, *, first: bool) -> Finding:
    shared = entry.kind.lower().startswith(SHARED_KINDS)
    name = f"{'scratch' if first else 'path'} {entry.path}"
    value = f"{entry.kind}, {entry.free_bytes >> 30} GiB free, flock " + (
        "works" if entry.flock else "fails"
    )
    if not entry.writable:
        return Finding(
            name=name, value=f"{entry.kind}, not writable", severity=Severity.note,
            meaning="nothing can be kept here", fix=f"give {entry.path} to its users",
        )  # fmt: skip
    if first and shared:
        return Finding(
            name=name, value=value, severity=Severity.problem,
            meaning="a shared file system under every environment is slow, and loads the servers",
            fix="TMPDIR on node-local disk (Slurm: JobContainerType=job_container/tmpfs)",
        )  # fmt: skip
    if first and not entry.flock:
        return Finding(
            name=name, value=value, severity=Severity.problem,
            meaning="leftovers of dead jobs can't be told from the living",
            fix="choose another site.scratch, or mount it with flock",
        )  # fmt: skip
    if first and entry.free_bytes < SCRATCH_BYTES_ENOUGH:
        return Finding(
            name=name, value=value, severity=Severity.note, meaning="few environments fit",
            fix=f"at least {SCRATCH_BYTES_ENOUGH >> 30} GiB of local disk, or another site.scratch",
        )  # fmt: skip
    meaning = "leases here need no flock" if not first else "layers of environments lie here"
    return Finding(name=name, value=value, meaning=meaning)


def _gpus(facts: Facts) -> Finding:
    if not facts.gpus:
        return Finding(
            name="GPU", value="none here", severity=Severity.note,
            meaning="this host trains and serves on CPU (a login node often has no GPU)",
        )  # fmt: skip
    names = ", ".join(f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus))
    return Finding(name="GPU", value=f"{names}; driver {facts.driver}", meaning="CUDA can be used")


def _identity(facts: Facts) -> list[Finding]:
    if not facts.is_root:
        return []
    return [Finding(
        name="user", value="root", severity=Severity.note,
        meaning="what works for root may fail for users, and process limits don't bind it",
        fix="run prorl-hpc as an ordinary user",
    )]  # fmt: skip
