"""A recipe directory with a site of its own, so that tests depend on no shipped site."""

from pathlib import Path

SITE = """\
# @package site
name: desk
backend: local
cpus: 2
placements:
  default:
    partition: desk
    max_nodes: 4
    max_walltime_minutes: 120
    cpus_per_node: 4
    memory_mib: 16384
max_node_hours: 100.0
"""


def recipe_directory(path: Path) -> Path:
    """Makes `path` with the site `desk`."""
    (path / "site").mkdir(parents=True)
    (path / "site" / "desk.yaml").write_text(SITE)
    return path
