"""Primitives on single files that keep what the installer gave them: mode, owner, xattrs, times.

But for `digest_content` and `traits`, nothing follows a symbolic link: a link is a file of its own.
Every file of the overlay passes through here several times, so paths may be plain texts: to make
a `Path` takes longer than most of these calls.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from patcher.value import Value

if TYPE_CHECKING:
    from pathlib import Path

# How many syncs wait for the disk at the same time: a journalling filesystem serves them together.
AT_ONCE = 4

_PIECE = 1 << 16
# What `link(2)` says where hard links cannot be had: other filesystem, none supported, too many,
# or not allowed to link a file that somebody else owns (fs.protected_hardlinks).
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
# What a filesystem without extended attributes says, as many in user space are.
_NO_XATTRS = {errno.ENOTSUP, errno.ENOSYS}
# Attributes that only a privileged user may set, or that the filesystem sets by itself.
_PRIVILEGED_XATTRS = ("security.", "trusted.", "system.")


class Traits(Value):
    """What an installer gave a file beside content and times: mode and owner, and its xattrs."""

    status: os.stat_result
    xattrs: tuple[tuple[str, bytes], ...]


def traits(path: str | Path) -> Traits:
    """Return the traits of the file or folder at ``path``.

    A symbolic link has no mode of its own worth keeping; the file behind it has.
    """
    try:
        names = os.listxattr(path)
    except OSError as error:
        if error.errno not in _NO_XATTRS:
            raise
        names = []
    xattrs = []
    for name in names:
        try:
            xattrs.append((name, os.getxattr(path, name)))
        except OSError:
            if not name.startswith(_PRIVILEGED_XATTRS):
                raise
    return Traits(status=os.stat(path), xattrs=tuple(xattrs))


def digest(content: bytes) -> str:
    """Return the sha256 of ``content`` in hex."""
    return hashlib.sha256(content).hexdigest()


def digest_path(path: str | Path, *, content: str | None = None) -> str | None:
    """Return what stands at ``path``: a sha256 in hex, ``link:TARGET``, or None for nothing.

    ``content`` is what the file there hashes to, if that was found out already.
    """
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return f"link:{os.readlink(path)}"
        if content is not None:
            return content
        return digest(read(path)) if stat.S_ISREG(mode) else "special"
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest_content(path: str | Path) -> str | None:
    """Return the sha256 of the file at ``path``, through a link too; None for nothing.

    What is there and is no file, such as a pipe, is ``special``: reading it could wait for ever.
    """
    try:
        return digest(read(path)) if stat.S_ISREG(os.stat(path).st_mode) else "special"
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: str | Path) -> bytes:
    """Return the content of the file at ``path``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        content = os.read(descriptor, size + 1 if size else _PIECE)
        while len(content) != size:  # what grows, or has no size, as in /proc
            more = os.read(descriptor, _PIECE)
            if not more:
                break
            content += more
        return content
    finally:
        os.close(descriptor)


def clone(source: str | Path, target: str | Path) -> None:
    """Give the file at ``source`` the second name ``target``, or copy it whole where it cannot.

    A hard link keeps every attribute by being the same file. The copy keeps content, mode, owner,
    xattrs and mtime; it is durable after `sync`.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    else:
        return
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    else:
        stamp = os.lstat(source).st_mtime_ns
        write(target, read(source), like=traits(source), mtime_ns=stamp)


def write(target: str | Path, content: bytes, *, like: Traits, mtime_ns: int) -> None:
    """Create the new file ``target`` with the mode, owner and xattrs in ``like``.

    It is durable after `sync`.
    """
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        _take_after(descriptor, like)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        # Starts the write, so that `sync` finds most of it done and the files share a commit.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def make_directory(target: str | Path, *, like: str | Path) -> None:
    """Make ``target`` a folder with the mode and owner of the folder ``like``."""
    try:
        os.mkdir(target, mode=0o700)
    except FileExistsError:
        if not os.path.isdir(target):
            raise
    status = os.stat(like)
    _own(target, status)
    os.chmod(target, stat.S_IMODE(status.st_mode))


def make_parents(path: str | Path) -> None:
    """Create the missing folders above ``path``, each with the mode and owner of its parent."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_parents(parent)
        make_directory(parent, like=os.path.dirname(parent))


def remove_empty(folder: str | Path) -> None:
    """Remove ``folder`` unless somebody keeps something in it; it may be gone already."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def sync(path: str | Path) -> None:
    """Make durable what is in the file ``path``, or which names are in the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Sequence[str | Path]) -> None:
    """Make durable all of ``paths``, files and folders: returns, or raises, when nothing is left.

    `AT_ONCE` syncs wait at a time, this thread's among them. Each thread stops at its first
    error; the first of all is raised when every thread has ended.
    """
    import threading  # only a change needs it

    errors: list[BaseException] = []

    def work(part: Sequence[str | Path]) -> None:
        try:
            for path in part:
                sync(path)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    parts = [paths[first::AT_ONCE] for first in range(min(AT_ONCE, len(paths)))]
    helpers = []
    for part in parts[1:]:
        helper = threading.Thread(target=work, args=(part,))
        try:
            helper.start()
        except RuntimeError:  # a limit on threads: slower then, and as safe
            work(part)
        else:
            helpers.append(helper)
    for part in parts[:1]:
        work(part)
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def remove_tree(path: str | Path) -> None:
    """Delete the folder ``path`` and all in it; it may be gone already."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(descriptor):
            os.unlink(name, dir_fd=descriptor)
    except IsADirectoryError:
        import shutil  # slow to load, and only a stranger's folder needs it

        shutil.rmtree(path)
    else:
        os.rmdir(path)
    finally:
        os.close(descriptor)


def _take_after(descriptor: int, like: Traits) -> None:
    _own(descriptor, like.status)
    for name, value in like.xattrs:
        try:
            os.setxattr(descriptor, name, value)
        except OSError as error:
            if error.errno not in _NO_XATTRS and not name.startswith(_PRIVILEGED_XATTRS):
                raise
    os.fchmod(descriptor, stat.S_IMODE(like.status.st_mode))


def _own(target: str | Path | int, status: os.stat_result) -> None:
    """Give ``target`` the owner in ``status``, where it has another and this user may."""
    own = os.stat(target)
    if (own.st_uid, own.st_gid) == (status.st_uid, status.st_gid):
        return
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)
    elif own.st_gid != status.st_gid and status.st_gid in os.getgroups():
        os.chown(target, -1, status.st_gid)
