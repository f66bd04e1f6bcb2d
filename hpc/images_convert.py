"""Dockerfile to definition file, through spython (the only place that imports it).

spython copies what it doesn't understand or drops it silently; the result is checked here and
every instruction that has no meaning in a rootless image is named. Builds nothing.
"""

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import ImageError

MEANINGLESS = {
    "EXPOSE": "containers here have no network of their own",
    "HEALTHCHECK": "nothing watches over a container",
    "STOPSIGNAL": "containers end with their job",
    "VOLUME": "bind directories when the container starts",
    "USER": "a rootless container runs as whoever starts it",
    "ONBUILD": "write the instruction into the image that needs it",
    "MAINTAINER": "",
}
REFUSED = {
    "SHELL": "%post is run by /bin/sh; call the other shell in a RUN",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A definition file's text and what of the Dockerfile isn't in it."""

    text: str
    notes: tuple[str, ...]


def convert_dockerfile(dockerfile: Path, *, base: str | None = None) -> Conversion:
    """The definition file of `dockerfile`; `base` (an image file) replaces its registry image.

    Raises ImageError for what can't be converted faithfully.
    """
    try:
        source = dockerfile.read_text()
    except (OSError, ValueError) as err:
        raise ImageError(f"Dockerfile {dockerfile} can't be read: {err}") from err
    kept, notes = _screen(source, dockerfile)
    text = _translate(kept, dockerfile)
    if base is not None:
        text = re.sub(r"\ABootstrap:.*\nFrom:.*\n(Stage:.*\n)?", "", text)
        text = f"Bootstrap: localimage\nFrom: {base}\n{text}"
    if not re.search(r"^From: *\S", text, re.MULTILINE):
        raise ImageError(f"Dockerfile {dockerfile} has no FROM; add one or give base=IMAGE.sif")
    return Conversion(text=text, notes=tuple(notes))


def _screen(source: str, dockerfile: Path) -> tuple[str, list[str]]:
    """Leaves out what means nothing here, and refuses what would come out wrong."""
    kept, notes, stages = [], [], 0
    for number, line in _instructions(source):
        word = line.split(maxsplit=1)[0].upper() if line.strip() else ""
        where = f"{dockerfile}:{number}: {word}"
        if word in MEANINGLESS:
            notes.append(f"{where} left out: {MEANINGLESS[word]}".rstrip(": "))
            continue
        if word in REFUSED:
            raise ImageError(f"{where} can't be converted: {REFUSED[word]}")
        stages += word == "FROM"
        if stages > 1 or (word in ("COPY", "ADD") and "--from=" in line):
            raise ImageError(
                f"{where}: several stages can't be converted; build that image with Docker or "
                "Podman and import its archive (prorl-hpc images import)"
            )
        if word == "ADD" and re.search(r"\s(https?|ftp|git)[:@]", line):
            raise ImageError(f"{where} of an address: fetch it in a RUN, with a digest check")
        if word in ("RUN", "COPY") and re.search(r"<<-?\s*['\"]?\w", line):
            raise ImageError(f"{where} with a here-document can't be converted; use a script file")
        kept.append(line)
    return "\n".join(kept) + "\n", notes


def _instructions(source: str) -> list[tuple[int, str]]:
    """Logical lines with their numbers, comments left out."""
    found: list[tuple[int, str]] = []
    start, pending = 1, ""
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        if not pending:
            start = number
        pending += line
        if line.rstrip().endswith("\\"):
            pending += "\n"
            continue
        if pending.strip():
            found.append((start, pending))
        pending = ""
    if pending.strip():
        found.append((start, pending.rstrip("\\\n ")))
    return found


def _translate(source: str, dockerfile: Path) -> str:
    from spython.main.parse.parsers import DockerParser
    from spython.main.parse.writers import SingularityWriter

    with tempfile.TemporaryDirectory(prefix="prorl-convert-") as directory:
        screened = Path(directory) / "Dockerfile"
        screened.write_text(source)
        said = io.StringIO()
        try:
            # it prints warnings and exits on errors
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                text = SingularityWriter(DockerParser(str(screened)).recipe).convert()
        except (Exception, SystemExit) as err:
            raise ImageError(
                f"Dockerfile {dockerfile} can't be converted: {err}; {said.getvalue().strip()}"
            ) from err
    if not isinstance(text, str) or not text.strip():
        raise ImageError(f"Dockerfile {dockerfile} came out empty")
    return text.rstrip() + "\n"
