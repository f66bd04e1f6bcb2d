"""Which sandbox a task's options ask for: backend, image, accepted weaknesses. Starts nothing."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hpc.container_probe import probe
from hpc.errors import ImageError
from hpc.images import ImageStore
from hpc.images_build import unpack_image
from hpc.isolation import Feature
from prorl_hpc.choices import EnvironmentKind
from prorl_hpc.environment.base import Backend, Limits
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.tasks.base import TaskError

OPTIONS = frozenset({"image", "images", "unpack", "accept_missing", "limits"})
"""What every task with a sandbox understands."""


@dataclass(kw_only=True, slots=True)
class Sandboxes:
    """The sandboxes of one task; looks each image up, and checks its digest, once per process."""

    task: str
    backend: Backend
    image: str
    """A path, or a name in `images`; may hold `{instance_id}`; empty: the backend's default."""
    default_image: str
    images: Path | None
    unpack: Path | None
    """Node-local directory in which images of the store are unpacked; None: they are mounted."""
    accept_missing: frozenset[Feature]
    limits: Limits
    """Of each environment."""
    _found: dict[str, Path | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def image_of(self, instance_id: str, *, own: str = "") -> Path | None:
        """File or directory; None is the machine's own /usr. `own` is the data set's image.

        Raises ImageError or TaskError with what to do.
        """
        name = self.image.replace("{instance_id}", instance_id)
        if own and "{instance_id}" not in self.image:
            name = own
        with self._lock:
            if name not in self._found:
                self._found[name] = self._resolve(name)
            return self._found[name]

    def _resolve(self, name: str) -> Path | None:
        if not name and self.backend is Backend.bubblewrap:
            return None
        name = name or self.default_image
        if Path(name).is_absolute():
            if not Path(name).exists():
                raise ImageError(f"tasks.{self.task}.options.image={name!r} doesn't exist here")
            return Path(name)
        if self.images is None:
            raise TaskError(
                f"tasks.{self.task}.options.image={name!r} is a name, and no image store is given; "
                f"set PRORL_IMAGES or tasks.{self.task}.options.images=DIR (prorl-hpc images build "
                f"{name} ...), or choose tasks.{self.task}.environment=bubblewrap"
            )
        store = ImageStore(self.images)
        # data sets name images like `owner/name:tag`
        plain = name.replace("/", "_").replace(":", "_")
        if self.unpack is not None:
            runtime = probe().runtime
            return unpack_image(store, plain, cache=self.unpack, runtime=runtime)
        store.verify(plain)
        return store.path(plain)


def read_sandboxes(
    task: str, config: TaskConfig, *, default_image: str, limits: Limits
) -> Sandboxes:
    """The options of a task, checked; `limits` are the kind's own. Raises TaskError."""
    if config.environment not in (EnvironmentKind.apptainer, EnvironmentKind.bubblewrap):
        raise TaskError(
            f"tasks.{task}.environment={config.environment} can't hold untrusted code; choose "
            "apptainer or bubblewrap"
        )
    options = config.options
    try:
        accepted = frozenset(Feature(one) for one in options.get("accept_missing") or ())
    except ValueError as err:
        known = ", ".join(Feature)
        raise TaskError(f"tasks.{task}.options.accept_missing: {err}; known: {known}") from err
    images, unpack = options.get("images"), options.get("unpack")
    image = str(options.get("image") or "")
    return Sandboxes(
        task=task,
        backend=Backend(config.environment.value),
        image=str(Path(image).expanduser()) if image.startswith("~") else image,
        default_image=default_image,
        images=Path(str(images)).expanduser().absolute() if images else None,
        unpack=Path(str(unpack)).expanduser().absolute() if unpack else None,
        accept_missing=accepted,
        limits=read_limits(task, options.get("limits") or {}, limits),
    )


def read_limits(task: str, given: object, limits: Limits) -> Limits:
    """`limits` with the recipe's own numbers in their place. Raises TaskError."""
    where = f"tasks.{task}.options.limits"
    if not isinstance(given, Mapping):
        raise TaskError(f"{where}={given!r} isn't a mapping like {{memory_bytes: 8589934592}}")
    known = {one.name for one in fields(Limits)}
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose of {', '.join(sorted(known))}"
            raise TaskError(f"{where}.{name} is unknown; {hint}")
        whole = isinstance(getattr(limits, name), int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise TaskError(f"{where}.{name}={value!r} isn't a{' whole' if whole else ''} number")
    try:
        return replace(limits, **given)
    except ValueError as err:
        raise TaskError(f"tasks.{task}.options.{err}") from err


def check_options(task: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises TaskError for an option that nobody reads."""
    unknown = sorted(set(options) - known)
    if unknown:
        choices = ", ".join(sorted(known))
        raise TaskError(f"tasks.{task}.options.{unknown[0]} is unknown; choose from {choices}")
