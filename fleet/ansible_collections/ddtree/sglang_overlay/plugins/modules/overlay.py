"""Bring an installed SGLang to patched or pristine with the verified bundle."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import bundle

DOCUMENTATION = r"""
module: overlay
short_description: Apply the DDTree overlay to an installed SGLang, or take it off
version_added: "0.1.0"
description:
  - Ships the one-file bundle to the host for this task, after its signature was verified on the
    controller, checks its sha256 there and runs it.
  - The host needs Python 3.10 or newer and nothing else; it fetches nothing.
author: DDTree overlay developers (@ddtree)
options:
  state:
    description: What the tree is to be.
    type: str
    choices: [patched, pristine]
    default: patched
  target:
    description: A site-packages folder, a virtual environment or a Python executable.
    type: str
    required: true
  bundle:
    description: The bundle on the controller; its signature lies beside it as C(<bundle>.sig).
    type: path
    required: true
  allowed_signers:
    description: OpenSSH's allowed-signers file on the controller. Required on the task.
    type: path
  signer:
    description: Who must have signed, as named in that file. Required on the task.
    type: str
  sha256:
    description: Set by the action plugin from the bytes it verified.
    type: str
  python:
    description: The host's interpreter that runs the bundle; the one that runs this by default.
    type: str
  allow_downgrade:
    description: Replace a newer overlay by this one.
    type: bool
    default: false
attributes:
  check_mode:
    description: Plans with the engine's own --check and writes nothing.
    support: full
  diff_mode:
    description: Shows the engine's unified diff.
    support: full
"""

EXAMPLES = r"""
- name: Apply the overlay
  ddtree.sglang_overlay.overlay:
    target: /opt/venv
    bundle: dist/sglang-overlay.pyz
    allowed_signers: fleet/allowed_signers
    signer: release@example.org
"""

RETURN = r"""
overlay:
  description: The JSON document of the engine, as in docs/operations.md.
  type: dict
  returned: always
"""


def main() -> None:
    """Run the bundle and hand its answer to Ansible."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["patched", "pristine"], "default": "patched"},
            "target": {"type": "str", "required": True},
            "bundle": {"type": "path", "required": True},
            "allowed_signers": {"type": "path"},
            "signer": {"type": "str"},
            "sha256": {"type": "str"},
            "python": {"type": "str"},
            "allow_downgrade": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    words = ["apply" if given["state"] == "patched" else "revert", "--target", given["target"]]
    words += ["--check"] if module.check_mode else []
    words += ["--diff"] if module._diff else []
    words += ["--allow-downgrade"] if given["allow_downgrade"] else []
    try:
        code, document = bundle.ask(
            Path(given["bundle"]),
            given["sha256"] or "",
            words,
            python=given["python"] or sys.executable,
        )
    except bundle.BundleFault as fault:
        module.fail_json(msg=str(fault))
    result = {"changed": document["changed"], "overlay": document}
    if module._diff:
        result["diff"] = {"prepared": document.get("diff", "")}
    if code != 0:
        module.fail_json(msg=bundle.faults(document) or f"the bundle ended with {code}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
