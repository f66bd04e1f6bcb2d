"""Makes a 64-bit ELF file that was built on glibc 2.38 load on glibc 2.36.

Knows one case: imports named `__isoc23_NAME` at version GLIBC_2.38, which a newer compiler puts in
place of plain `NAME`. Each becomes `NAME` at the oldest glibc version the file asks for, and the
entry that asked for GLIBC_2.38 asks for that oldest version too. Any other need is refused.
"""

import struct
import sys
from pathlib import Path

SHT_DYNSYM, SHT_VERSYM, SHT_VERNEED = 11, 0x6FFFFFFF, 0x6FFFFFFE
NEWEST_KNOWN = (2, 36)
PREFIX = b"__isoc23_"


class Refused(Exception):
    """The file needs more of a newer glibc than this script can give."""


def glibc_version(name: bytes) -> tuple[int, ...] | None:
    head, _, tail = name.partition(b"_")
    if head != b"GLIBC" or not tail.replace(b".", b"").isdigit():
        return None
    return tuple(int(part) for part in tail.split(b"."))


class Elf:
    def __init__(self, data: bytearray) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise Refused("not a little-endian 64-bit ELF file")
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + n * size) for n in range(count)]
        self.sections = {header[1]: header for header in headers}
        self.strings_at = headers[self.sections[SHT_DYNSYM][6]][4]

    def string(self, offset: int) -> bytes:
        start = self.strings_at + offset
        return bytes(self.data[start : self.data.index(0, start)])

    def needs(self) -> list[tuple[int, int, bytes]]:
        """Every version this file asks for: (position of the entry, its index, its name)."""
        found: list[tuple[int, int, bytes]] = []
        entry = self.sections[SHT_VERNEED][4]
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, entry)
            at = entry + first
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, at)
                found.append((at, index & 0x7FFF, self.string(name)))
                at += step
            if not following:
                return found
            entry += following


def rebind(data: bytearray) -> list[str]:
    """Change `data` in place; the names that were rebound."""
    elf = Elf(data)
    versions = [(glibc_version(name), at, index) for at, index, name in elf.needs()]
    glibc = [(version, at, index) for version, at, index in versions if version is not None]
    newer = [entry for entry in glibc if entry[0] > NEWEST_KNOWN]
    if not newer:
        return []
    _, oldest_at, oldest_index = min(glibc)
    newer_indices = {index for _, _, index in newer}
    changed: list[str] = []
    symbols, marks = elf.sections[SHT_DYNSYM], elf.sections[SHT_VERSYM][4]
    for number in range(symbols[5] // 24):
        mark_at = marks + 2 * number
        (mark,) = struct.unpack_from("<H", data, mark_at)
        if mark & 0x7FFF not in newer_indices:
            continue
        symbol_at = symbols[4] + 24 * number
        (name_at,) = struct.unpack_from("<I", data, symbol_at)
        name = elf.string(name_at)
        if not name.startswith(PREFIX):
            raise Refused(f"{name.decode()} exists in a newer glibc only")
        struct.pack_into("<I", data, symbol_at, name_at + len(PREFIX))
        struct.pack_into("<H", data, mark_at, oldest_index)
        changed.append(name.decode())
    for _, at, _ in newer:
        data[at : at + 4] = data[oldest_at : oldest_at + 4]  # hash of the version's name
        data[at + 8 : at + 12] = data[oldest_at + 8 : oldest_at + 12]  # where that name is
    return changed


def main(paths: list[str]) -> int:
    for path in map(Path, paths):
        data = bytearray(path.read_bytes())
        try:
            changed = rebind(data)
        except Refused as err:
            print(f"{path}: {err}", file=sys.stderr)
            return 1
        if changed:
            path.write_bytes(data)
        print(f"{path}: rebound {len(changed)} symbols")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
