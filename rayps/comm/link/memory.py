"""Memory that two processes of one host share: anonymous, passed by descriptor, gone with its last user.

It has no name, so nothing is left behind by kill -9, no other user can open it, and the size of /dev/shm does not
bound it. It is sealed against shrinking, so that no peer can pull it away from under a reader. What is in it, and when
it may be read, is agreed by messages on a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import sys
import threading

from rayps.core.errors import LinkError

AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")
# whether other processes see what one writes in the order of writing; elsewhere only a call of the kernel makes sure
ORDERED = platform.machine().lower() in ("x86_64", "amd64")

_SEAL_FUTURE_WRITE = 0x10  # fcntl has no name for it


class Fence:
    """Makes what was written before it visible before what is read after it: a lock is such an instruction."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self) -> None:
        """Order this thread's earlier loads and stores before its later ones."""
        self._acquire()
        self._release()


class Memory:
    """A shared segment of `size` bytes; `view` is its bytes, which can be written unless it is `read_only`."""

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
        """New memory, all zero; pages are taken when they are first touched. Raises LinkError."""
        try:
            fd = os.memfd_create("rayps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, max(1, size))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(fd, max(1, size))
        except OSError as error:
            raise LinkError(
                f"cannot get {size} bytes of shared memory ({error.strerror}); use prefer='tcp'", size=size
            ) from error

    @classmethod
    def attach(cls, fd: int, size: int, *, read_only: bool = False) -> Memory:
        """Memory that a peer made; takes over `fd`. Raises LinkError when it is smaller than the peer says."""
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise LinkError(f"a peer passed shared memory of less than the {size} bytes it promised", size=size)
        return cls(fd, size, read_only=read_only)

    def seal_writes(self) -> None:
        """From now on nobody else can map this for writing, where the kernel knows how (Linux 5.1)."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)

    def close_descriptor(self) -> None:
        """Keep the memory, give up the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:  # the mapping has a descriptor of its own, and ends by itself
            self.close_descriptor()

    def close(self) -> None:
        """Give up the memory; tensors that still use it keep it alive until they go. Safe to call twice."""
        self.close_descriptor()
        # Not unmapped here: a tensor may still lie in it. The mapping ends with the last reference.
        self.view = memoryview(b"")
        self._map = None
