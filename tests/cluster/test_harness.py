"""mini-swe-agent from PyPI, unmodified, in a real container without network, on a real bug.

The model is a script, so that what is shown is the way and not the model: an answer that applies
the gold patch is worth 1, handing in nothing is worth 0.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc.files import asset_directory

pytestmark = [pytest.mark.timeout(1800), pytest.mark.process]


@pytest.fixture(scope="module")
def package(apptainer: Any) -> Path:
    """The program's packages, for the image's Python."""
    directory: Path = apptainer.user.new_directory("harness") / "mini"
    told = apptainer.run(
        ["exec", str(apptainer.rootfs), "python3", "-c",
         "import sys; print('%d.%d' % sys.version_info[:2])"]
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    pins = asset_directory("recipes") / "data" / "mini_swe_agent.txt"
    done = apptainer.user.run(
        ["python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
         "--only-binary", ":all:",
         "--python-version", told.stdout.strip(), "--target", str(directory), "-r", str(pins)],
        timeout=900.0,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"no package index to be reached: {done.stderr.strip().splitlines()[-1]}")
    # Byte code of what is used, made once: most of what pip would compile never is.
    code = "import sys; sys.path.insert(0, '/package'); import minisweagent.run.mini"
    code += ", minisweagent.agents.interactive, minisweagent.models.litellm_model"
    variables = "MSWEA_GLOBAL_CONFIG_DIR=/tmp/mini,LITELLM_LOCAL_MODEL_COST_MAP=True"
    used = apptainer.run(
        ["exec", "--bind", f"{directory}:/package", "--env", variables, str(apptainer.rootfs),
         "python3", "-I", "-c", code], timeout=600.0,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    return directory


def test_mini_swe_agent_mends_a_real_bug(apptainer: Any, package: Path) -> None:
    script = Path(__file__).resolve().with_name("harness_steps.py")
    root = apptainer.user.new_directory("bug")
    done = apptainer.user.run(
        ["python", "-B", str(script), str(apptainer.rootfs), str(package), str(root)],
        timeout=1500.0,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    if "skip" in told:
        pytest.skip(told["skip"])
    gold, empty = told
    assert (gold["outcome"], gold["reward"], gold["finish"]) == ("scored", 1.0, "stop"), gold
    assert (empty["outcome"], empty["reward"]) == ("scored", 0.0), empty
    assert empty["components"]["empty_patch"] == 1.0
    # One trajectory: every prompt is a prefix of it, and only answers count.
    for one, num_calls in ((gold, 3), (empty, 1)):
        assert one["prompts_are_prefixes"], one
        assert one["components"]["calls"] == num_calls
        assert one["components"]["branches"] == 1.0
        assert one["sampled"].count("<tool_call>") == num_calls
        assert one["network"] == "True"
    # What the program showed its model: a sandbox with nothing but a loopback, and the mended file.
    assert '"output": "    lo\\n M xmltodict.py\\n"' in gold["whole"]
