"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.errors import ConfigError

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Make `folder` and hold it for the block; the system lets go when this process ends, however it ends.

    On a file system that has no locks nothing is held. ConfigError: the folder cannot be written, or another process
    holds it, e.g. a worker whose launcher was killed.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another folder with `run`") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run writes to {folder} and holds {path}: wait for it, stop it (workers outlive a launcher "
                "that was killed), or choose another folder with `run`"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
