"""The configuration files of a private Slurm on one host, as text.

Knows Slurm's settings and why each value was chosen. Performs no I/O and starts nothing.
"""

from dataclasses import dataclass
from pathlib import Path

CPUS_PER_NODE = 16
MEMORY_MIB_PER_NODE = 32_000
GPUS_PER_NODE = 8
MAX_ARRAY_SIZE = 101
FORGET_SECONDS = 5
"""So long after its end the controller forgets a job where accounting remembers it."""


@dataclass(frozen=True)
class Layout:
    """What the files are made from. Layouts with different tags and ports can run at once."""

    prefix: Path
    host: str
    """This machine's short host name: slurmctld insists on finding itself under it."""
    tag: str
    """Part of every node name: cgroups are named after nodes, and all clusters share them."""
    controller_port: int
    database_port: int
    node_ports: tuple[int, ...]
    slurm_version: tuple[int, int]
    cgroup_v1: bool
    """Whether cgroup v1 tracks the processes; else walking /proc does, which kills less surely."""
    accounting: bool

    @property
    def cpu_nodes(self) -> tuple[str, ...]:
        return tuple(f"cn-{self.tag}-{number}" for number in (1, 2, 3))

    @property
    def gpu_nodes(self) -> tuple[str, ...]:
        return tuple(f"gn-{self.tag}-{number}" for number in (1, 2))

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.cpu_nodes + self.gpu_nodes


def slurm_conf(layout: Layout) -> str:
    at = layout.prefix
    # A requeued job waits for cred_expire before it may start: the minimum, not two minutes.
    general = f"""\
ClusterName=prorl{layout.tag}
SlurmctldHost={layout.host}(127.0.0.1)
SlurmctldPort={layout.controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/run/munge.socket,cred_expire=5
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool/%n
SlurmctldPidFile={at}/run/slurmctld.pid
SlurmdPidFile={at}/run/slurmd-%n.pid
SlurmctldLogFile={at}/log/slurmctld.log
SlurmdLogFile={at}/log/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
PriorityType=priority/multifactor
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=10
InactiveLimit=0
MinJobAge={FORGET_SECONDS if layout.accounting else 900}
MaxArraySize={MAX_ARRAY_SIZE}
MaxJobCount=5000
TCPTimeout=2
MessageTimeout=10
PrologFlags=Alloc
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
"""
    tracking = (
        "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\n"
        if layout.cgroup_v1
        else "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        "JobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill\n"
    )
    return general + tracking + _accounting(layout) + _nodes(layout) + _partitions(layout)


def _accounting(layout: Layout) -> str:
    if not layout.accounting:
        return "AccountingStorageType=accounting_storage/none\n"
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={layout.database_port}
AccountingStoragePass={layout.prefix}/run/munge.socket
AccountingStorageTRES=gres/gpu
"""


def _nodes(layout: Layout) -> str:
    lines = []
    for name, port in zip(layout.nodes, layout.node_ports, strict=True):
        gpus = (
            f"Gres=gpu:h100:{GPUS_PER_NODE} Feature=h100"
            if name in layout.gpu_nodes
            else "Feature=cpu"
        )
        lines.append(
            f"NodeName={name} NodeHostname={layout.host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={CPUS_PER_NODE} RealMemory={MEMORY_MIB_PER_NODE} {gpus} State=UNKNOWN\n"
        )
    return "".join(lines)


def _partitions(layout: Layout) -> str:
    cpu, gpu = ",".join(layout.cpu_nodes), ",".join(layout.gpu_nodes)
    common = "MaxTime=1-0 DefMemPerCPU=500 State=UP"
    return f"""\
PartitionName=cpu Nodes={cpu} Default=YES {common} PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes={gpu} {common} PriorityTier=10 PreemptMode=OFF
PartitionName=preemptible Nodes={cpu} {common} PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes={cpu} {common} PriorityTier=100 PreemptMode=OFF
"""


def gres_conf(layout: Layout) -> str:
    # Only a character device makes Slurm set CUDA_VISIBLE_DEVICES.
    return (
        "AutoDetect=off\n"
        f"NodeName={','.join(layout.gpu_nodes)} Name=gpu Type=h100 "
        f"File={layout.prefix}/dev/nvidia[0-{GPUS_PER_NODE - 1}] Flags=nvidia_gpu_env\n"
    )


def cgroup_conf(layout: Layout) -> str:
    if layout.cgroup_v1:
        return "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"
    return f"CgroupPlugin={'disabled' if layout.slurm_version >= (23, 11) else 'autodetect'}\n"


def slurmdbd_conf(layout: Layout) -> str:
    at = layout.prefix
    return f"""\
AuthType=auth/munge
AuthInfo=socket={at}/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={layout.database_port}
SlurmUser=root
DebugLevel=info
LogFile={at}/log/slurmdbd.log
PidFile={at}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
