"""A first site profile from the facts of a cluster: YAML text, to be completed by hand.

Pure. Knows what a site file looks like; judges nothing.
"""

import re

from hpc.doctor import max_array_size
from hpc.doctor_facts import Facts, Partition


def site_profile(facts: Facts, *, name: str) -> str:
    """A first `site/NAME.yaml`, to be completed by hand where it says so."""
    lines = ["# @package site", f"# Drafted by `prorl-hpc doctor` for user {facts.user}.",
             f"name: {name}"]  # fmt: skip
    scratch = facts.file_systems[0].path if facts.file_systems else "/tmp"  # noqa: S108
    if facts.slurm_version is None:
        lines += ["backend: local", f"scratch: {_quoted(scratch)}", "placements:", "  default:",
                  "    partition: local"]  # fmt: skip
        return "\n".join(lines) + "\n"
    spelling = "gres"
    lines += [
        "backend: slurm", f"slurm_version: [{facts.slurm_version[0]}, {facts.slurm_version[1]}]",
        f"gpu_spelling: {spelling}", f"accounting: {str(facts.sacct_works).lower()}",
        f"max_array_size: {max_array_size(facts)}", f"scratch: {_quoted(scratch)}", "placements:",
    ]  # fmt: skip
    cancel = "CANCEL" in facts.slurm_config.get("PreemptMode", "").upper()
    default = [entry for entry in facts.partitions if entry.is_default] or [*facts.partitions]
    gpu = [entry for entry in facts.partitions if "gpu" in entry.gres]
    for role, found in (("default", default), ("rollout", gpu), ("learner", gpu)):
        if found:
            lines += _placement(role, found[0], cancel=cancel)
    return "\n".join(lines) + "\n"


def _placement(role: str, entry: Partition, *, cancel: bool) -> list[str]:
    lines = [f"  {role}:", f"    partition: {_quoted(entry.name)}"]
    match = re.search(r"gpu:([A-Za-z][\w.-]*):", entry.gres)
    if match and role != "default":
        lines.append(f"    gpu_type: {_quoted(match[1])}")
    if entry.num_cpus:
        lines.append(f"    cpus_per_node: {entry.num_cpus}")
    if entry.memory_mib:
        lines.append(f"    memory_mib: {entry.memory_mib}")
    minutes = walltime_minutes(entry.walltime)
    if minutes is not None:
        lines.append(f"    max_walltime_minutes: {minutes}")
    if cancel:
        lines.append("    on_preempt: cancel")
    return lines


def walltime_minutes(text: str) -> int | None:
    """Minutes of Slurm's `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; None for `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, _ = (int(word or 0) for word in match.groups())
    return days * 1440 + hours * 60 + minutes


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w./-]+", text) else "'" + text.replace("'", "''") + "'"
