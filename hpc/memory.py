"""How the C library keeps memory that was freed. Knows glibc; elsewhere it does nothing."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory(num_bytes: int) -> bool:
    """Lets this process keep up to so many freed bytes for what it allocates next.

    By default every buffer of more than 128 KiB comes fresh from the kernel, which clears it page
    by page: for a process that passes messages on, that costs more than copying them. Whether it
    could be done.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAX_MMAP_THRESHOLD) and mallopt(TRIM_THRESHOLD, num_bytes))
