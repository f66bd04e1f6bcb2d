"""The store: one build however many ask, whole files only, digests that are checked."""

import json
import os
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc.container import Runtime
from hpc.errors import ImageError
from hpc.images import DigestMismatch, ImageMissing, ImageStore, digest
from hpc.images_build import SourceKind, build_image, import_image, recognise, unpack_image
from hpc.images_convert import convert_dockerfile
from hpc.images_lease import is_held, lease

# printf hello | sha256sum
HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def make_hello(path: Path) -> None:
    path.write_bytes(b"hello")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    (tmp_path / "store").mkdir()
    return ImageStore(tmp_path / "store", scratch=tmp_path / "scratch")


def files(store: ImageStore) -> list[str]:
    return sorted(entry.name for entry in store.root.iterdir() if entry.name != ".leases")


def test_an_image_is_published_locked_and_found_again(store: ImageStore) -> None:
    record = store.ensure("a", source="s", source_key="k1", make=make_hello)
    assert (record.sha256, record.num_bytes) == (HELLO, 5)
    assert store.verify("a") == record
    assert store.list() == (record,)

    def never(path: Path) -> None:
        raise AssertionError(path)

    assert store.ensure("a", source="s", source_key="k1", make=never) == record
    again = store.ensure("a", source="s", source_key="k2", make=lambda p: _write(p, b"other"))
    assert again.sha256 != HELLO
    assert files(store) == ["a.sif", "images.lock"]
    assert list((store.root / ".leases").iterdir()) == []
    assert list((store.root.parent / "scratch").iterdir()) == []


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def test_many_ask_and_one_builds(store: ImageStore) -> None:
    built = []

    def slow(path: Path) -> None:
        built.append(path)
        time.sleep(0.3)
        make_hello(path)

    def ask(_number: int) -> str:
        own = ImageStore(store.root, scratch=store.root.parent / "scratch")
        return own.ensure("a", source="s", source_key="k", make=slow).sha256

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {HELLO}
    assert len(built) == 1


def test_different_images_are_built_at_once(store: ImageStore) -> None:
    together = threading.Barrier(3, timeout=300)

    def meet(path: Path) -> None:
        together.wait()
        make_hello(path)

    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(store.ensure, name, source="s", source_key="k", make=meet)
            for name in ("a", "b", "c")
        ]
        assert {future.result().name for future in asked} == {"a", "b", "c"}
    assert [record.name for record in store.list()] == ["a", "b", "c"]


def test_a_failed_build_leaves_nothing(store: ImageStore) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ImageError("the build failed")

    for make, message in ((fail, "the build failed"), (lambda path: None, "made no file")):
        with pytest.raises(ImageError, match=message):
            store.ensure("a", source="s", source_key="k", make=make)
    assert files(store) == []
    assert list((store.root.parent / "scratch").iterdir()) == []
    with pytest.raises(ImageMissing, match="images build"):
        store.verify("a")


def test_a_full_store_is_told_and_nothing_is_left(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.ensure("a", source="s", source_key="k", make=make_hello)

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpc.images.shutil.copyfileobj", full)
    with pytest.raises(ImageError, match="No space left on device; free space"):
        store.ensure("a", source="s", source_key="k2", make=lambda p: _write(p, b"new"))
    assert files(store) == ["a.sif", "images.lock"]
    assert store.verify("a").sha256 == HELLO  # the old one is whole


def test_damage_is_found(store: ImageStore) -> None:
    for name in ("same-size", "shorter", "gone", "good"):
        store.ensure(name, source="s", source_key="k", make=make_hello)
    store.path("same-size").write_bytes(b"hellO")
    store.path("shorter").write_bytes(b"hell")
    store.path("gone").unlink()
    with pytest.raises(DigestMismatch, match=f"instead of {HELLO}"):
        store.verify("same-size")
    with pytest.raises(DigestMismatch, match="4 bytes"):
        store.verify("shorter")
    with pytest.raises(ImageMissing, match="is missing"):
        store.verify("gone")
    problems = {found.name: bool(found.problem) for found in store.verify_all()}
    assert problems == {"good": False, "same-size": True, "shorter": True, "gone": True}
    # asked for again, a shortened one is built again
    assert store.ensure("shorter", source="s", source_key="k", make=make_hello).sha256 == HELLO
    assert store.verify("shorter")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ('{"images": []}', "damaged"),
        ('{"format": 99, "images": []}', "newer than 1"),
        ('{"format": 1, "images": [{"nme": 1}]}', "damaged"),
    ],
)
def test_a_bad_lock_file(store: ImageStore, text: str, message: str) -> None:
    store.lock_path.write_text(text)
    with pytest.raises(ImageError, match=message):
        store.list()


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a b", "a" * 200])
def test_bad_names(store: ImageStore, name: str) -> None:
    with pytest.raises(ImageError, match="may hold"):
        store.path(name)


def test_gc_spares_what_is_locked_or_built_now(store: ImageStore) -> None:
    store.ensure("kept", source="s", source_key="k", make=make_hello)
    (store.root / "foreign.sif").write_bytes(b"1")
    (store.root / ".half.sif.0123456789ab.tmp").write_bytes(b"1")
    (store.root / ".busy.sif.0123456789ab.tmp").write_bytes(b"1")
    (store.root / "README").write_bytes(b"1")
    with lease(store.root / ".leases" / "busy.lease", wait_seconds=1.0):
        would = store.gc(dry_run=True)
        assert [path.name for path in would] == [".half.sif.0123456789ab.tmp", "foreign.sif"]
        assert store.gc() == would
    assert files(store) == [".busy.sif.0123456789ab.tmp", "README", "images.lock", "kept.sif"]
    store.remove("kept")
    assert store.list() == ()
    assert not store.path("kept").exists()


def test_a_dead_builders_lease_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "a.lease"
    path.write_text("a host that is gone")
    with (
        pytest.raises(ImageError, match="held by a host that is gone"),
        lease(path, wait_seconds=0.0),
    ):
        pass
    old = time.time() - 3600
    os.utime(path, (old, old))
    assert not is_held(path)
    with lease(path, wait_seconds=10.0):
        assert is_held(path)
    assert list(tmp_path.iterdir()) == []


def test_sources_are_recognised(tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs"
    (rootfs / "bin").mkdir(parents=True)
    (rootfs / "bin" / "sh").write_text("#!")
    oci = tmp_path / "oci"
    oci.mkdir()
    (oci / "oci-layout").write_text("{}")
    (oci / "index.json").write_text("{}")
    (tmp_path / "x.sif").write_bytes(b"#!/usr/bin/env run-singularity\nSIF_MAGIC\0more")
    for name, member in (("docker", "manifest.json"), ("oci-tar", "oci-layout"), ("root", "./etc")):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(rootfs / "bin" / "sh", arcname=member)
    kinds = {
        name: recognise(tmp_path / name).kind
        for name in ("rootfs", "oci", "x.sif", "docker.tar", "oci-tar.tar", "root.tar")
    }
    assert kinds == {
        "rootfs": SourceKind.directory, "oci": SourceKind.oci, "x.sif": SourceKind.sif,
        "docker.tar": SourceKind.docker_archive, "oci-tar.tar": SourceKind.oci_archive,
        "root.tar": SourceKind.tar,
    }  # fmt: skip
    before = recognise(rootfs).key
    (rootfs / "bin" / "sh").write_text("#!/changed")
    assert recognise(rootfs).key != before


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    whole = tmp_path / "whole.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(tmp_path / "text", arcname="notes.txt")
    for name, message in (
        ("empty", "no root file system"), ("absent", "doesn't exist"), ("text", "neither a SIF"),
        ("whole.tar", "neither an image"),
    ):  # fmt: skip
        with pytest.raises(ImageError, match=message):
            recognise(tmp_path / name)


@pytest.fixture
def fake_runtime(tmp_path: Path) -> Runtime:
    """A runtime whose `build` notes its arguments in the image; `bad` fails, `slow` never ends."""
    script = tmp_path / "apptainer"
    script.write_text(
        "#!/bin/bash\nfor word; do target=$origin; origin=$word; done\n"
        '[[ $* == *--sandbox* ]] && mkdir "$target" && target=$target/file\n'
        'echo "half" > "$target"\n'
        '[[ $origin == *bad* ]] && { echo "FATAL: no such thing"; exit 255; }\n'
        "[[ $origin == *slow* ]] && sleep 600\n"
        'echo "$PWD $*" > "$target"\n'
    )
    script.chmod(0o755)
    return Runtime(flavour="apptainer", path=str(script), version=(1, 4, 0), version_text="1.4.0")


def test_builds_from_definitions(store: ImageStore, fake_runtime: Runtime, tmp_path: Path) -> None:
    store.ensure("base", source="s", source_key="k", make=make_hello)
    definition = tmp_path / "swe.def"
    definition.write_text("Bootstrap: localimage\nFrom: base.sif\n")
    first = build_image(store, "swe", definition=definition, runtime=fake_runtime)
    assert store.path("swe").read_text().startswith(str(store.root))  # where base.sif is
    assert build_image(store, "swe", definition=definition, runtime=fake_runtime) == first
    # another base makes another image
    store.ensure("base", source="s", source_key="k2", make=lambda p: _write(p, b"other"))
    second = build_image(store, "swe", definition=definition, runtime=fake_runtime)
    assert second.source_key != first.source_key


def test_failed_and_endless_builds(
    store: ImageStore, fake_runtime: Runtime, tmp_path: Path
) -> None:
    for name, message in (("bad", "FATAL: no such thing"), ("slow", "more than timeout_seconds")):
        definition = tmp_path / f"{name}.def"
        definition.write_text("Bootstrap: x\n")
        with pytest.raises(ImageError, match=message):
            build_image(
                store, name, definition=definition, runtime=fake_runtime, timeout_seconds=1.0
            )
    with pytest.raises(ImageError, match="needs Apptainer"):
        build_image(store, "x", definition=tmp_path / "bad.def", runtime=None)
    with pytest.raises(ImageError, match="can't be read"):
        build_image(store, "x", definition=tmp_path / "absent.def", runtime=fake_runtime)
    assert files(store) == []


def test_imports(store: ImageStore, fake_runtime: Runtime, tmp_path: Path) -> None:
    sif = tmp_path / "x.sif"
    sif.write_bytes(b"#!/usr/bin/env run-singularity\nSIF_MAGIC\0more")
    record = import_image(store, "copied", source=sif, runtime=None)  # no runtime needed
    assert record.sha256 == digest(sif)
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc" / "passwd").write_text("root")
    import_image(store, "directory", source=rootfs, runtime=fake_runtime)
    assert store.path("directory").read_text().rstrip().endswith(str(rootfs))
    archive = tmp_path / "rootfs.tar"
    with tarfile.open(archive, "w") as stream:
        stream.add(rootfs / "etc", arcname="etc")
    import_image(store, "tar", source=archive, runtime=fake_runtime)
    assert ".rootfs" in store.path("tar").read_text()
    docker = tmp_path / "docker.tar"
    with tarfile.open(docker, "w") as stream:
        stream.add(rootfs / "etc" / "passwd", arcname="manifest.json")
    import_image(store, "docker", source=docker, runtime=fake_runtime)
    assert f"docker-archive:{docker}" in store.path("docker").read_text()


def test_too_little_room_is_told_before_the_build(
    store: ImageStore, fake_runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc" / "big").write_bytes(b"1" * 3_000_000)

    class Usage:
        free = 1 << 20

    monkeypatch.setattr("hpc.images_build.shutil.disk_usage", lambda path: Usage)
    with pytest.raises(ImageError, match="1 MiB free and the build needs about 5 MiB"):
        import_image(store, "a", source=rootfs, runtime=fake_runtime)


def test_unpacking_once_per_digest(
    store: ImageStore, fake_runtime: Runtime, tmp_path: Path
) -> None:
    store.ensure("a", source="s", source_key="k", make=make_hello)
    cache = tmp_path / "cache"
    directory = unpack_image(store, "a", cache=cache, runtime=fake_runtime)
    assert directory.name == f"a-{HELLO[:16]}"
    assert unpack_image(store, "a", cache=cache, runtime=None) == directory
    assert [entry.name for entry in cache.iterdir()] == [directory.name]
    store.path("a").write_bytes(b"hellO")
    with pytest.raises(DigestMismatch):
        unpack_image(store, "a", cache=cache, runtime=fake_runtime)


def test_dockerfile_conversion(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        "# comment\nFROM python:3.11-slim\nENV A=b\nWORKDIR /app\nCOPY a.txt /x/\n"
        "RUN pip install \\\n    requests\nUSER bob\nEXPOSE 80\nHEALTHCHECK NONE\n"
        'CMD ["python", "-m", "x"]\n'
    )
    made = convert_dockerfile(dockerfile)
    assert made.text.startswith("Bootstrap: docker\nFrom: python:3.11-slim")
    for part in ("%post", "pip install", "requests", "export A=b", "a.txt /x/", "%runscript"):
        assert part in made.text, made.text
    assert "bob" not in made.text
    assert [note.split(": ")[1].split()[0] for note in made.notes] == [
        "USER", "EXPOSE", "HEALTHCHECK"
    ]  # fmt: skip
    local = convert_dockerfile(dockerfile, base="base.sif").text
    assert local.startswith("Bootstrap: localimage\nFrom: base.sif\n")
    assert "docker" not in local


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM a AS x\nFROM b\nCOPY --from=x /a /b\n", "several stages"),
        ("FROM a\nADD https://x.org/y /z\n", "of an address"),
        ('FROM a\nSHELL ["bash"]\n', "SHELL can't be converted"),
        ("FROM a\nRUN <<EOF\necho\nEOF\n", "here-document"),
        ("RUN true\n", "can't be converted|no FROM"),
    ],
)
def test_dockerfiles_that_would_come_out_wrong(tmp_path: Path, text: str, message: str) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(text)
    with pytest.raises(ImageError, match=message):
        convert_dockerfile(dockerfile)


def test_the_lock_file_is_stable_text(store: ImageStore) -> None:
    for name in ("b", "a"):
        store.ensure(name, source="s", source_key="k", make=make_hello)
    document = json.loads(store.lock_path.read_text())
    assert document["format"] == 1
    assert [entry["name"] for entry in document["images"]] == ["a", "b"]
