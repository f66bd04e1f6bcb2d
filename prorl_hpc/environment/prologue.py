"""What a fresh shell is told before the agent's first command. Pure text; starts nothing."""

import shlex

from prorl_hpc.environment.base import EnvironmentSpec, SandboxStartError


def setup_script(spec: EnvironmentSpec, *, home: str) -> str:
    """Variables, working directory, the spec's prologue. Raises SandboxStartError."""
    variables = {
        "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat",
    } | dict(spec.variables)  # fmt: skip
    lines = ["unset ${!APPTAINER*} ${!SINGULARITY*} PROMPT_COMMAND LD_LIBRARY_PATH"]
    for name, value in variables.items():
        if not name.isidentifier() or "\0" in value:
            raise SandboxStartError(f"variables[{name!r}] can't be exported by a shell")
        lines.append(f"export {name}={shlex.quote(value)}")
    directory = shlex.quote(spec.directory)
    lines.append(f"mkdir -p -- {shlex.quote(home)} {directory} && cd -- {directory}")
    if spec.prologue:
        lines.append(f"[ $? -eq 0 ] && {{ {spec.prologue}\n}}")
    return "\n".join(lines)


def what_setup_does(spec: EnvironmentSpec) -> str:
    """For the message when it fails."""
    entering = f"entering directory={spec.directory!r}"
    return f"{entering}, or prologue={spec.prologue!r}," if spec.prologue else entering
