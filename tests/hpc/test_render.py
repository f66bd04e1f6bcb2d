"""Scripts: golden text, hostile values, chunks, shellcheck."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpc.errors import PlanError, SiteError
from hpc.prepare import templates
from hpc.render import Interpreter, chunks, quote, render
from hpc.site import GpuSpelling, OnPreempt, Placement, Site
from tests.hpc.plans import HOSTILE, job, plan, resources, slurm_site

GOLDEN = Path(__file__).parent.parent / "golden"
SHELLCHECK = str(Path(sys.executable).parent / "shellcheck")
PYTHON = Interpreter(python="/opt/venv/bin/python")


def scripts(*jobs: object, site: Site | None = None, directory: str = "/runs/r1") -> dict[str, str]:
    made = plan(*jobs, directory=directory)  # type: ignore[arg-type]
    return render(made, site or slurm_site(), templates=templates(), interpreter=PYTHON)


def golden_scripts() -> dict[str, str]:
    placements = {
        "default": Placement(partition="cpu"),
        "rollout": Placement(
            partition="a100", account="p1", gpu_type="a100", on_preempt=OnPreempt.cancel
        ),
        "inference": Placement(partition="a100", account="p1", gpu_type="a100"),
        "learner": Placement(
            partition="h100",
            account="p1",
            qos="long",
            reservation="prorl",
            constraint="nvlink&ib",
            gpu_type="h100",
            directives=("--exclusive", "--mail-user=some one@example.org"),
        ),
    }
    made = scripts(
        job("buffer", "/opt/venv/bin/python", "-m", "buffer"),
        job("rollout", "rollout", "--name", HOSTILE, resources=resources(gpus_per_node=2),
            array_size=1500, array_limit=101, after=("buffer",),
            environment=(("MESSAGE", f"{HOSTILE}\nsecond line"),)),
        job("inference", "/opt/venv/bin/python", "-m", "inference",
            resources=resources(gpus_per_node=4), array_size=3, after=("buffer",)),
        job("learner", "learner", resources=resources(nodes=4, gpus_per_node=8),
            after=("buffer",), restarts=False),
        site=slurm_site(
            placements=placements, setup=("module load apptainer",), scratch="/local scratch"
        ),
        directory=f"/runs/{HOSTILE}",
    )  # fmt: skip
    spelled = slurm_site(placements=placements, gpu_spelling=GpuSpelling.gpus_per_node)
    other = scripts(job("learner", "learner", resources=resources(gpus_per_node=4)), site=spelled)
    return {**made, "gpus-per-node": other["learner"]}


@pytest.mark.parametrize("name", sorted(golden_scripts()))
def test_golden(name: str) -> None:
    """Byte for byte. To accept a change: `python -m tests.hpc.test_render` writes the files."""
    assert golden_scripts()[name] == (GOLDEN / f"{name}.sbatch").read_text()


def test_golden_files_are_all_checked() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sbatch")} == set(golden_scripts())


def test_shellcheck_and_bash_find_nothing() -> None:
    files = sorted(str(path) for path in GOLDEN.glob("*.sbatch"))
    for path in files:
        subprocess.run(["bash", "-n", path], check=True, timeout=300)
    checked = subprocess.run([SHELLCHECK, *files], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout


def test_hostile_values_arrive_unchanged(tmp_path: Path) -> None:
    values = (HOSTILE, "two\nlines", "--flag=x y", "", "\\", "ü∀")
    text = scripts(
        job("learner", "/bin/echo", *values, environment=tuple(enumerate_names(values)))
    )["learner"]
    cut = text.index("# ---- Signals")
    shown = f'{text[:cut]}\nprintf \'%s\\0\' "${{command[@]:1}}" "$V0" "$V1" "$V2" "$V5"'
    done = subprocess.run(["bash", "-c", shown], capture_output=True, timeout=300, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    assert words == [*values, values[0], values[1], values[2], values[5]]


def enumerate_names(values: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(f"V{number}", value) for number, value in enumerate(values)]


@pytest.mark.parametrize("name", ["rollout", "buffer", "learner"])
def test_a_busy_controller_does_not_end_the_chain(name: str) -> None:
    """The end of the script, with a scontrol that fails twice."""
    text = golden_scripts()[name]
    stubs = """
    python=answer code=75 asked=USR2 script=x SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=8
    SLURM_ARRAY_TASK_ID=3
    answer() { [ "$3" != end ] || echo requeue; }
    sleep() { echo "sleep $1"; }
    scontrol() { echo "scontrol $*"; calls=$((calls + 1)); [ "$calls" -gt 2 ]; }
    """
    done = subprocess.run(
        ["bash", "-c", stubs + text[text.index("# ---- What follows") :]],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    job_id = "8_3" if name == "rollout" else "7"
    asked = f"scontrol requeue {job_id}"
    assert done.stdout.splitlines() == [asked, "sleep 10", asked, "sleep 30", asked]
    assert done.returncode == 75


def test_chunks_divide_the_limit() -> None:
    site = slurm_site(max_array_size=1000)
    parts = chunks(job("rollout", array_size=2500, array_limit=100), site)
    assert [(part.name, part.index_offset, part.size, part.limit) for part in parts] == [
        ("rollout", 0, 1000, 34),  # 100 = 34 + 33 + 33
        ("rollout.chunk-1", 1000, 1000, 33),
        ("rollout.chunk-2", 2000, 500, 33),
    ]
    with pytest.raises(SiteError, match="array_limit=2"):
        chunks(job("rollout", array_size=2500, array_limit=2), site)


def test_local_max_array_size_is_the_number_of_tasks() -> None:
    assert [part.size for part in chunks(job("r", array_size=1001), slurm_site())] == [1001]
    assert [part.size for part in chunks(job("r", array_size=1002), slurm_site())] == [1001, 1]


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "\x1b[31m"])
def test_control_characters_in_directives_are_refused(value: str) -> None:
    with pytest.raises(SiteError, match="control character"):
        quote(value, "partition")


def test_quote_by_hand() -> None:
    assert quote("gpu:h100:8", "gres") == "gpu:h100:8"
    assert quote('a "b" \\', "x") == '"a \\"b\\" \\\\"'


def test_values_that_no_script_can_hold() -> None:
    with pytest.raises(PlanError, match="backslash"):
        scripts(job(), directory="/runs/a\\b")
    with pytest.raises(PlanError, match="shell variable"):
        scripts(job(environment=(("A B", "x"),)))
    with pytest.raises(PlanError, match="shell variable"):
        scripts(job(environment=(("A", "x\0y"),)))
    with pytest.raises(PlanError, match="nodes=2"):
        scripts(job(array_size=3, resources=resources(nodes=2)))
    with pytest.raises(SiteError, match="no sbatch option"):
        placement = Placement(partition="x", directives=("exclusive; rm -rf",))
        scripts(job(), site=slurm_site(placements={"default": placement}))
    with pytest.raises(PlanError, match="control character"):
        render(plan(job(), run="a\nb"), slurm_site(), templates=templates(), interpreter=PYTHON)


def test_nothing_goes_through_export() -> None:
    for text in golden_scripts().values():
        assert "--export" not in text


if __name__ == "__main__":
    for name, text in golden_scripts().items():
        (GOLDEN / f"{name}.sbatch").write_text(text)
