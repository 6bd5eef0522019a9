"""Whether a bundle is signed by someone who may: OpenSSH's ``ssh-keygen -Y``, on the controller."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

NAMESPACE = "sglang-overlay"


class SignatureFault(Exception):
    """The bundle is not signed, not by one who may, or was altered since."""


def sign(bundle: Path, key: Path) -> Path:
    """Sign ``bundle`` with the private ``key``; return the signature's file, beside it.

    Raises:
        SignatureFault: it could not be signed. A signature that was there before is still there.
    """
    signature = bundle.with_name(f"{bundle.name}.sig")
    try:
        done = subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE],
            input=bundle.read_bytes(),
            capture_output=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout:
            _replace(signature, done.stdout)
            return signature
    except OSError as error:
        raise SignatureFault(f"{bundle} could not be signed: {error}") from error
    said = done.stderr.decode(errors="replace").strip()
    raise SignatureFault(
        f"{bundle} could not be signed with {key} ({said}): give a private key that ssh-keygen "
        "can read; nothing was written"
    )


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as staged:
        try:
            staged.write(content)
            staged.flush()
            os.fchmod(staged.fileno(), 0o644)
            Path(staged.name).replace(path)
        except OSError:
            Path(staged.name).unlink()
            raise


def verified(bundle: Path, *, allowed_signers: Path, signer: str) -> tuple[bytes, str]:
    """Return the bundle's bytes and their SHA-256 in hex, after its signature has been verified.

    The signature lies beside it as ``<bundle>.sig``. The bytes that are returned are those that
    were verified: use them, and do not read the file again.

    Raises:
        SignatureFault: there is no signature, or it is not ``signer``'s over these bytes.
    """
    signature = bundle.with_name(f"{bundle.name}.sig")
    for path, what in ((bundle, "bundle"), (signature, "signature"), (allowed_signers, "list")):
        if not path.is_file():
            raise SignatureFault(
                f"there is no {what} {path}: a bundle is only shipped with its signature and an "
                "allowed-signers file; sign it with `fleet sign`"
            )
    content = bundle.read_bytes()
    done = subprocess.run(
        ["ssh-keygen", "-Y", "verify", "-f", str(allowed_signers), "-I", signer]
        + ["-n", NAMESPACE, "-s", str(signature)],
        input=content,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise SignatureFault(f"{bundle} is refused: not as {signer!r} signed it ({said})")
    return content, hashlib.sha256(content).hexdigest()
