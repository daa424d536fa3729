"""One copy of large read-only arrays in a file of shared memory, for all processes of a host.

Of several processes that start together one fills the file, the others wait. The file gets its name
once it is whole, so a process that dies while it fills leaves nothing but an unnamed part, which
the next one takes over: the kernel has released its lock. Every user holds a lock of the file; the
last one to let go removes it, and whoever makes a new one removes those that nobody holds.
"""

import fcntl
import hashlib
import mmap
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from errno import EINVAL
from pathlib import Path

import numpy as np

from dsv41_jax.errors import UserError

PREFIX, PART = "dsv41-shared-", ".part"
MAGIC = b"dsv41 shared copy 1\n"
HUGE = 1 << 21  # arrays begin at multiples of it, so that huge pages can hold them
PIECE = 1 << 24
WAIT_S, POLL_S = 1800.0, 0.1
_FOREIGN_S = 1.0  # for others that have found the same foreign file to let go of it
_SAMPLES, _SAMPLE = 256, 4096
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14; an error where a store would be a bus error

Check = Callable[[str, int, np.ndarray], None]


@dataclass(frozen=True)
class Planes:
    """Arrays uint8 [...] by name as they lie in a file, and a digest that tells them from others:
    of names and shapes, size and time of the files that they are mapped from, samples of the bytes.
    """

    arrays: Mapping[str, np.ndarray]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256(MAGIC)
        for name, array in self.arrays.items():
            if array.dtype != np.uint8:
                raise ValueError(f"{name}: {array.dtype=} must be uint8")
            found.update(f"{name}{array.shape}{_source(array)}\0".encode())
        found.update(samples(self.arrays).encode())
        object.__setattr__(self, "digest", found.hexdigest())

    @property
    def offsets(self) -> dict[str, int]:
        found, at = {}, HUGE
        for name, array in self.arrays.items():
            found[name] = at
            at += -(-array.nbytes // HUGE) * HUGE
        return found

    @property
    def nbytes(self) -> int:
        """Of the file: a header, then the arrays."""
        return HUGE + sum(-(-array.nbytes // HUGE) * HUGE for array in self.arrays.values())

    @property
    def header(self) -> bytes:
        return MAGIC + self.digest.encode()

    def within(self, mapping: mmap.mmap) -> dict[str, np.ndarray]:
        """The arrays of a mapped file."""
        return {
            name: np.frombuffer(mapping, np.uint8, array.nbytes, at).reshape(array.shape)
            for (name, array), at in zip(self.arrays.items(), self.offsets.values(), strict=True)
        }


def samples(arrays: Mapping[str, np.ndarray]) -> str:
    """Digest of some of the bytes of each array, its first and last ones among them."""
    found = hashlib.sha256()
    for array in arrays.values():
        flat = array.reshape(-1)
        for start in np.linspace(0, max(0, flat.size - _SAMPLE), _SAMPLES, dtype=np.int64):
            found.update(flat[start : start + _SAMPLE].tobytes())
    return found.hexdigest()


def _source(array: np.ndarray) -> str:
    """Size and time of the file that an array is mapped from, if it is."""
    base = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None:
        return ""
    status = os.stat(base.filename)
    return f" {status.st_size} {status.st_mtime_ns}"


class SharedCopy:
    """An attached file. arrays: read-only, in huge pages where the system gives some. created:
    whether this process filled it.
    """

    def __init__(self, path: Path, handle: int, planes: Planes, *, created: bool):
        self.path, self.created, self.nbytes = path, created, planes.nbytes
        mapping = mmap.mmap(handle, planes.nbytes, prot=mmap.PROT_READ)
        self.arrays = planes.within(mapping)
        self._release = weakref.finalize(self, _let_go, handle, path)

    def close(self) -> None:
        """Let go of the file; the arrays stay readable. Also done when the process ends."""
        self._release()


def shared_copy(
    planes: Planes,
    directory: Path,
    *,
    check: Check = lambda name, start, values: None,
    wait_s: float = WAIT_S,
    progress: Callable[[str], None] = lambda text: None,
) -> SharedCopy:
    """The copy of the arrays in a directory of shared memory, made by this process or another.

    check(name, start, values) sees every byte before it is shared and raises what is wrong with it.
    UserError if the memory does not suffice, another process holds a file of that name with
    something else, or does not finish the copy within ``wait_s`` seconds.
    """
    path = directory / f"{PREFIX}{planes.digest[:32]}"
    began, told = time.monotonic(), False
    deadline = began + wait_s
    while True:
        handle = _attached(path, planes, patient=time.monotonic() < began + _FOREIGN_S)
        if handle is not None:
            return SharedCopy(path, handle, planes, created=False)
        handle = _led(path)
        if handle is not None:
            progress(f"copy {planes.nbytes / 1e9:.2f} GB to {path}")
            _fill(handle, path, planes, check)
            return SharedCopy(path, handle, planes, created=True)
        if time.monotonic() > deadline:
            raise UserError(f"{path}: another process did not finish it within {wait_s:g} s")
        if not told:
            progress(f"another process makes {path}: wait up to {wait_s:g} s")
        told = True
        time.sleep(POLL_S)


def _attached(path: Path, planes: Planes, patient: bool) -> int | None:
    """A handle of the whole file with a lock that many may hold; None if there is none yet, or, to
    the ``patient``, if another process holds a file with something else.
    """
    handle = _opened(path, os.O_RDONLY)
    if handle is None:
        return None
    if not _locked(handle, path, fcntl.LOCK_SH):
        return None
    if _holds(handle, planes):
        return handle
    if not _locked(handle, path, fcntl.LOCK_EX):
        if patient:  # the other one may be about to remove it, too
            return None
        raise UserError(f"{path}: holds something else, and another process uses it")
    path.unlink()
    os.close(handle)
    return None


def _led(path: Path) -> int | None:
    """A handle of the part, locked for this process alone; None if another one fills it or has just
    done so.
    """
    part = path.with_name(path.name + PART)
    handle = _opened(part, os.O_RDWR | os.O_CREAT)
    if handle is None or not _locked(handle, part, fcntl.LOCK_EX):
        return None
    if path.exists():
        part.unlink()
        os.close(handle)
        return None
    return handle


def _opened(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UserError(f"{path.parent}: is not a directory") from None
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error.strerror}") from None


def _locked(handle: int, path: Path, kind: int) -> bool:
    """Whether the file now has the lock and still its name; it is closed if not."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return False


def _holds(handle: int, planes: Planes) -> bool:
    """Whether a file is the copy, by its header and samples of it."""
    if os.fstat(handle).st_size != planes.nbytes:
        return False
    with mmap.mmap(handle, planes.nbytes, prot=mmap.PROT_READ) as mapping:
        if mapping[: len(planes.header)] != planes.header:
            return False
        found = samples(planes.within(mapping))
    return found == samples(planes.arrays)


def _fill(handle: int, path: Path, planes: Planes, check: Check) -> None:
    """Fill a part and give it its name; it is gone if that fails."""
    part = path.with_name(path.name + PART)
    try:
        remove_unused(path.parent, but=part)
        _reserve_file(handle, path.parent, planes.nbytes)
        mapping = mmap.mmap(handle, planes.nbytes)
        _reserve(handle, mapping, 0, len(planes.header))
        _copy(handle, mapping, planes, check)
        mapping[: len(planes.header)] = planes.header
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        os.close(handle)
        raise
    # Only behind the new name: between the two locks another process may take the file.
    fcntl.flock(handle, fcntl.LOCK_SH)


def _reserve_file(handle: int, directory: Path, nbytes: int) -> None:
    os.ftruncate(handle, 0)
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise UserError(f"{directory}: {nbytes / 1e9:.2f} GB needed, {free / 1e9:.2f} GB are free")
    os.ftruncate(handle, nbytes)


def _copy(handle: int, mapping: mmap.mmap, planes: Planes, check: Check) -> None:
    """Pieces of all arrays by threads; none of them spans two."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(mapping, mmap.MADV_HUGEPAGE, 0, planes.nbytes)
    into, offsets = planes.within(mapping), planes.offsets

    def fetch(piece: tuple[str, int]) -> None:
        name, start = piece
        values = planes.arrays[name].reshape(-1)[start : start + PIECE]
        check(name, start, values)
        _reserve(handle, mapping, offsets[name] + start, values.size)
        into[name].reshape(-1)[start : start + PIECE] = values

    pieces = [(n, at) for n, array in planes.arrays.items() for at in range(0, array.nbytes, PIECE)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(fetch, pieces))


def _reserve(handle: int, mapping: mmap.mmap, start: int, count: int) -> None:
    """Memory for a piece before anything is stored to it: where there is none a store would end
    the process.
    """
    try:
        if not _advise(mapping, _POPULATE_WRITE, start, count):
            os.posix_fallocate(handle, start, count)
    except OSError as error:
        raise UserError(f"shared memory does not suffice: {error.strerror}") from None


def _advise(mapping: mmap.mmap, option: int, start: int, count: int) -> bool:
    """Whether this kernel knows the option."""
    try:
        mapping.madvise(option, start, count)
    except OSError as error:
        if error.errno != EINVAL:
            raise
        return False
    return True


def remove_unused(directory: Path, *, but: Path) -> list[Path]:
    """Remove copies, and parts of some, that no process holds, ``but`` one; returns their paths."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            handle = None if path == but else os.open(path, os.O_RDONLY)
        except OSError:  # gone, or another user's
            continue
        if handle is not None and _locked(handle, path, fcntl.LOCK_EX):
            path.unlink()
            os.close(handle)
            removed.append(path)
    return removed


def _let_go(handle: int, path: Path) -> None:
    """Remove the file if no other process holds it."""
    if _locked(handle, path, fcntl.LOCK_EX):
        path.unlink()
        os.close(handle)
