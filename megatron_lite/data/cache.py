"""Index files: built once by whoever comes first, kept in a folder, found by everybody else.

An entry appears whole, under a name that no unfinished file ever has. While one process builds it, others that want it
wait: ranks of a node, nodes that share the folder, other runs. The system lets go of the lock of a process that is
killed, and the next one begins anew. On a file system without locks each builds for itself, and the last one wins.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from megatron_lite.data.indexed import atomic_file, naming, remove_stale

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer
VERSION = 1  # of everything in the cache; part of every name


class Cache:
    """A folder of entries, each named after its kind and everything that decides what it holds."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.opened: dict[Path, bool] = {}  # entry -> was it built here, or found, or built by a process waited for

    def entry(self, kind: str, key: str, suffix: str, build: Callable[[], bytes | np.ndarray]) -> Path:
        """Where the entry lies: the file of those bytes, or the .npy of that array, if need be built now."""
        name = hashlib.sha256(f"{VERSION} {kind} {key}".encode()).hexdigest()[:32]
        path = self.folder / f"{kind}-{name}{suffix}"
        if not path.is_file():
            with naming(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            with _alone(path) as alone:
                if not path.is_file():
                    if alone:
                        remove_stale(path)
                    content = build()
                    with atomic_file(path) as file:
                        np.save(file, content) if isinstance(content, np.ndarray) else file.write(content)
                    self.opened[path] = True
        self.opened.setdefault(path, False)
        return path


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold `path`.lock for the block, once no other process does; False if the file system has no locks."""
    lock = path.with_name(f"{path.name}.lock")
    while True:
        with naming(lock):
            file = lock.open("w")
        with file:
            held = _hold(file)
            if held and not _is(file, lock):
                continue  # its last holder removed it while this process waited
            try:
                yield held
            finally:
                lock.unlink(missing_ok=True)
            return


def _hold(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _is(file: IO[str], path: Path) -> bool:
    """Whether that is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
