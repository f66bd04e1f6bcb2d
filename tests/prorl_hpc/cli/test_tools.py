"""Tools for admins on the command line: site profiles, images, sandboxes; no job, no build."""

from pathlib import Path

import pytest

from prorl_hpc.cli.main import main
from prorl_hpc.compose import compose


def test_doctor_writes_a_site_that_composes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--problems", "--write-site", str(tmp_path / "own")]) == 0
    files = list((tmp_path / "own" / "site").iterdir())
    assert len(files) == 1
    assert f"--recipe-dir {tmp_path / 'own'} --dry-run" in capsys.readouterr().out
    recipe = compose(["recipe=quickstart", f"site={files[0].stem}"], recipe_dir=tmp_path / "own")
    assert recipe.site["name"] == files[0].stem
    before = files[0].read_bytes()
    assert main(["doctor", "--write-site", str(tmp_path / "own")]) == 2
    assert "exists; name a file that doesn't" in capsys.readouterr().err
    assert files[0].read_bytes() == before


def test_unpack_names_what_the_store_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    argv = ["images", "--store", str(store), "unpack", "base", "--cache", str(tmp_path / "cache")]
    assert main(argv) == 2
    assert "isn't a directory" in capsys.readouterr().err
    store.mkdir()
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "'base' is not in" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "cache").exists()
