"""Primitives on single files that keep what the installer gave them: mode, owner, xattrs, times.

But for `digest_content`, nothing follows a symbolic link: a link is a file of its own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# What `link(2)` says where hard links cannot be had: other filesystem, none supported, too many,
# or not allowed to link a file that somebody else owns (fs.protected_hardlinks).
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
# Attributes that only a privileged user may set, or that the filesystem sets by itself.
_PRIVILEGED_XATTRS = ("security.", "trusted.", "system.")


def digest(content: bytes) -> str:
    """Return the sha256 of ``content`` in hex."""
    return hashlib.sha256(content).hexdigest()


def digest_path(path: Path) -> str | None:
    """Return what stands at ``path``: a sha256 in hex, ``link:TARGET``, or None for nothing."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return f"link:{path.readlink()}"
        return digest(path.read_bytes()) if stat.S_ISREG(mode) else "special"
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest_content(path: Path) -> str | None:
    """Return the sha256 of the file at ``path``, through a link too; None for nothing.

    What is there and is no file, such as a pipe, is ``special``: reading it could wait for ever.
    """
    try:
        return digest(path.read_bytes()) if stat.S_ISREG(path.stat().st_mode) else "special"
    except (FileNotFoundError, NotADirectoryError):
        return None


def clone(source: Path, target: Path) -> None:
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
    if source.is_symlink():
        target.symlink_to(source.readlink())
    else:
        status = source.lstat()
        write(target, source.read_bytes(), like=source, mtime_ns=status.st_mtime_ns)


def write(target: Path, content: bytes, *, like: Path, mtime_ns: int) -> None:
    """Create the new file ``target`` with the mode, owner and xattrs of ``like``.

    It is durable after `sync`.
    """
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        _take_after(descriptor, like)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        # Starts the write, so that `sync` finds most of it done and the files share a commit.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def make_directory(target: Path, *, like: Path) -> None:
    """Make ``target`` a folder with the mode and owner of the folder ``like``."""
    target.mkdir(mode=0o700, exist_ok=True)
    status = like.stat()
    _own(target, status)
    target.chmod(stat.S_IMODE(status.st_mode))


def make_parents(path: Path) -> None:
    """Create the missing folders above ``path``, each with the mode and owner of its parent."""
    if not path.parent.is_dir():
        make_parents(path.parent)
        make_directory(path.parent, like=path.parent.parent)


def remove_empty(folder: Path) -> None:
    """Remove ``folder`` unless somebody keeps something in it; it may be gone already."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def sync(path: Path) -> None:
    """Make durable what is in the file ``path``, or which names are in the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Delete the folder ``path`` and all in it; it may be gone already."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(descriptor):  # noqa: PTH208 - a Path takes no descriptor
            os.unlink(name, dir_fd=descriptor)
    except IsADirectoryError:
        import shutil  # slow to load, and only a stranger's folder needs it

        shutil.rmtree(path)
    else:
        path.rmdir()
    finally:
        os.close(descriptor)


def _take_after(descriptor: int, like: Path) -> None:
    # A symbolic link has no mode of its own worth keeping; the file behind it has.
    status = like.stat()
    _own(descriptor, status)
    for name in os.listxattr(like):
        try:
            os.setxattr(descriptor, name, os.getxattr(like, name))
        except OSError:
            if not name.startswith(_PRIVILEGED_XATTRS):
                raise
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def _own(target: Path | int, status: os.stat_result) -> None:
    """Give ``target`` the owner in ``status``, where it has another and this user may."""
    own = os.stat(target)
    if (own.st_uid, own.st_gid) == (status.st_uid, status.st_gid):
        return
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)
    elif own.st_gid != status.st_gid and status.st_gid in os.getgroups():
        os.chown(target, -1, status.st_gid)
