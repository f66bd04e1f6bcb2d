"""`prorl-hpc images build`: what is asked, in which order, and what is told."""

from pathlib import Path

import pytest

from hpc.container_probe import probe
from hpc.errors import UserError
from prorl_hpc.cli.images_build import definitions, waves
from prorl_hpc.cli.main import main

RUNTIME = """#!/bin/sh
[ "$1" = --version ] && { echo apptainer version 1.3.0; exit; }
for word; do last=$word; target=$before; before=$word; done
grep -q broken "$last" && { echo "last words"; exit 3; }
cp "$last" "$target"
"""
"""Stands for a runtime: copies the definition to where the image should be."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = tmp_path / "apptainer"
    runtime.write_text(RUNTIME)
    runtime.chmod(0o755)
    monkeypatch.setenv("PRORL_APPTAINER", str(runtime))
    probe.cache_clear()
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


def test_shipped_definitions_in_their_order(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["images", "--store", str(store), "build", "swe", "base", "code"]) == 0
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert told[0] == "base"
    assert set(told) == {"base", "swe", "code"}
    assert {path.name for path in store.glob("*.sif")} == {"base.sif", "swe.sif", "code.sif"}
    probe.cache_clear()


def test_what_starts_from_a_failure_is_not_tried(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("one", "broken"), ("two", "From: one.sif"), ("three", "whole")):
        (tmp_path / f"{name}.def").write_text(text)
    monkeypatch.setattr("prorl_hpc.cli.images_build.asset_directory", lambda _: tmp_path)
    assert main(["images", "--store", str(store), "build", "one", "two", "three"]) == 1
    told = capsys.readouterr().out
    assert "one: FAILED: build from" in told
    assert "last words" in told
    assert "two: not built" in told
    assert "three: 0 MiB" in told
    assert [path.name for path in store.glob("*.sif")] == ["three.sif"]
    probe.cache_clear()


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are base, code, learner, swe, vllm"):
        definitions(["sew"])
    assert definitions(["mine", "x.def"])["mine"].name == "x.def"
    circle = {"a": tmp_path / "a", "b": tmp_path / "b"}
    circle["a"].write_text("From: b.sif")
    circle["b"].write_text("From: a.sif")
    with pytest.raises(UserError, match="start from each other"):
        waves(circle)
    assert main(["images", "--store", str(tmp_path), "build", "base", "--at-once", "0"]) == 2
