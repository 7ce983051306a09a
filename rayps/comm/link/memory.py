"""Memory shared by two processes of one host: anonymous, passed by descriptor, freed when its last user ends.

The memory has no name. Therefore kill -9 leaves nothing behind, no other user can open the memory, and the size of
/dev/shm does not limit it. It is sealed against shrinking, so that a peer cannot remove pages that are being read.
Messages on the peers' connection define what the memory contains and when it may be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import sys
import threading

from rayps_client.errors import LinkError

AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")
# whether other processes see writes in the order of writing on this processor; if not, peers signal by system calls
ORDERED = platform.machine().lower() in ("x86_64", "amd64")

_SEAL_FUTURE_WRITE = 0x10  # Python's fcntl has no name for this seal


class Fence:
    """A memory fence of the processor: after a call, earlier writes are visible before later reads are done.

    Python has no fence instruction, but a lock operation includes one.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self) -> None:
        """Order this thread's earlier loads and stores before its later ones."""
        self._acquire()
        self._release()


class Memory:
    """A block of shared memory of `size` bytes. `view` is its content, writable unless `read_only`."""

    def __init__(self, fd: int, size: int, *, read_only: bool = False) -> None:
        self.fd = fd
        self.size = size
        protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, size, prot=protection)
        except BaseException:
            self.close_descriptor()
            raise
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Memory:
        """Allocate `size` zero bytes. The system provides each page at its first access.

        Raises LinkError if the system refuses the memory.
        """
        try:
            fd = os.memfd_create("rayps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, max(1, size))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(fd, max(1, size))
        except OSError as error:
            raise LinkError(
                f"cannot allocate {size} bytes of shared memory ({error.strerror}): use prefer='tcp'", size=size
            ) from error

    @classmethod
    def attach(cls, fd: int, size: int, *, read_only: bool = False) -> Memory:
        """Map a peer's memory; this object closes `fd`. Raises LinkError if the memory is smaller than `size` bytes."""
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise LinkError(f"a peer passed less shared memory than the {size} bytes that it announced", size=size)
        return cls(fd, size, read_only=read_only)

    def seal_writes(self) -> None:
        """Forbid new writable mappings of this memory. This has no effect before Linux 5.1."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:  # the mapping has another descriptor and is unmapped with its last reference
            self.close_descriptor()

    def close(self) -> None:
        """Release the memory. It is freed when no tensor uses it any more. Safe to call twice."""
        self.close_descriptor()
        # the memory is not unmapped here, because a tensor may still use it; the last reference unmaps it
        self.view = memoryview(b"")
        self._map = None
