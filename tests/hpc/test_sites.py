"""The shipped site profiles are complete and load as sites."""

from pathlib import Path

import msgspec
import pytest
import yaml

from hpc.files import asset_directory
from hpc.prepare import check, templates
from hpc.render import Interpreter, render
from hpc.site import Backend, Placement, Site
from tests.hpc.plans import job, plan, resources

FILES = sorted(asset_directory("recipes").glob("site/*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_site_profile(path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[0] == "# @package site"
    site = msgspec.convert(yaml.safe_load(text), Site, strict=True)
    assert site.name == path.stem
    made = plan(
        job("buffer"),
        job("rollout", array_size=2),
        job(
            "learner", resources=resources(gpus_per_node=0 if site.backend is Backend.local else 8)
        ),
    )
    check(made, site)
    scripts = render(
        made, site, templates=templates(), interpreter=Interpreter(python="/usr/bin/python3")
    )
    assert set(scripts) == {"buffer", "rollout", "learner"}


def test_no_key_is_misspelt() -> None:
    for path in FILES:
        data = yaml.safe_load(path.read_text())
        assert set(data) <= set(Site.__dataclass_fields__)
        for placement in data["placements"].values():
            assert set(placement) <= set(Placement.__dataclass_fields__)
