"""Verify the bundle here, hand it to the host for this one task, and run the module with it.

The bundle lies in the task's own temporary folder, which Ansible removes: nothing is left on the
host, in check mode neither, and no task can run a bundle that was not verified.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.ddtree.sglang_overlay.plugins.plugin_utils.signature import (
    SignatureFault,
    verified,
)


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible has no types
    """Run the module of the same name with the verified bundle's place and hash."""

    _supports_check_mode = True
    _HERE = ("bundle", "allowed_signers", "signer")

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the module's result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        lacking = [name for name in self._HERE if not arguments.get(name)]
        if lacking:
            raise AnsibleActionFail(f"missing required arguments: {', '.join(lacking)}")
        bundle, allowed, signer = (str(arguments.pop(name)) for name in self._HERE)
        try:
            content, sha256 = verified(Path(bundle), allowed_signers=Path(allowed), signer=signer)
        except SignatureFault as fault:
            raise AnsibleActionFail(str(fault)) from fault
        shell = self._connection._shell
        if shell.tmpdir is None:
            self._make_tmp_path()
        remote = shell.join_path(shell.tmpdir, "sglang-overlay.pyz")
        with tempfile.NamedTemporaryFile() as local:
            local.write(content)
            local.flush()
            self._transfer_file(local.name, remote)
        self._fixup_perms2((shell.tmpdir, remote))
        module = self._execute_module(
            module_args={**arguments, "bundle": remote, "sha256": sha256}, task_vars=task_vars
        )
        self._remove_tmp_path(shell.tmpdir)
        return {**result, **module}
