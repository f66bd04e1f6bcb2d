"""What a fresh shell is told before the agent's first command. Pure text; starts nothing."""

import shlex

from prorl_hpc.environment.base import EnvironmentSpec, SandboxStartError

LOCALES = ("LANG", "LC_ALL")
"""Set to what the image has: of a locale that it lacks, shells and perl complain at each start, and
the complaint would stand before the output of each command."""


def setup_script(spec: EnvironmentSpec, *, home: str) -> str:
    """Variables, working directory, the spec's prologue. Raises SandboxStartError."""
    variables = {
        "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat",
    } | dict(spec.variables)  # fmt: skip
    lines = ["unset ${!APPTAINER*} ${!SINGULARITY*} PROMPT_COMMAND LD_LIBRARY_PATH"]
    for name, value in variables.items():
        if not name.isidentifier() or "\0" in value:
            raise SandboxStartError(f"variables[{name!r}] can't be exported by a shell")
        lines.append(_exported(name, shlex.quote(value)))
    directory = shlex.quote(spec.directory)
    lines.append(f"mkdir -p -- {shlex.quote(home)} {directory} && cd -- {directory}")
    if spec.prologue:
        lines.append(f"[ $? -eq 0 ] && {{ {spec.prologue}\n}}")
    return "\n".join(lines)


def _exported(name: str, quoted: str) -> str:
    if name not in LOCALES:
        return f"export {name}={quoted}"
    missing = f'[ -n "$( {{ LC_ALL={quoted}; }} 2>&1 )" ]'  # bash says so
    return f"if {missing}; then export {name}=C; else export {name}={quoted}; fi"


def what_setup_does(spec: EnvironmentSpec) -> str:
    """For the message when it fails."""
    entering = f"entering directory={spec.directory!r}"
    return f"{entering}, or prologue={spec.prologue!r}," if spec.prologue else entering
