"""Look at an installed SGLang with the verified bundle; change nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import bundle, tree

DOCUMENTATION = r"""
module: overlay_info
short_description: Say what an installed SGLang is, and verify it
version_added: "0.1.0"
description:
  - Runs C(status) of the bundle, and C(verify) if O(expect) is given. Fails where verify fails.
  - With O(plan), also plans that change without making it, and verifies a tree that is pristine.
author: DDTree overlay developers (@ddtree)
options:
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
  expect:
    description: Verify that the tree is this.
    type: str
    choices: [patched, pristine]
  plan:
    description: Plan the change to this state.
    type: str
    choices: [patched, pristine]
  require:
    description: Checks of verify that must not be skipped.
    type: list
    elements: str
    default: []
  skip:
    description: Checks of verify to leave out.
    type: list
    elements: str
    default: []
  free_mib:
    description: Fail if less than this many MiB are free at the target.
    type: int
    default: 0
attributes:
  check_mode:
    description: It never changes anything.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Look at the host
  ddtree.sglang_overlay.overlay_info:
    target: /opt/venv
    bundle: dist/sglang-overlay.pyz
    allowed_signers: fleet/allowed_signers
    signer: release@example.org
    expect: patched
"""

RETURN = r"""
overlay:
  description: The JSON document of C(status).
  type: dict
  returned: always
verify:
  description: The JSON document of C(verify).
  type: dict
  returned: when O(expect) is given
plan:
  description: The JSON document of the planned change.
  type: dict
  returned: when O(plan) is given
fingerprint:
  description: The fingerprint of the overlay on the disk, as a live server states it; or null.
  type: str
  returned: always
digest:
  description: One SHA-256 over all of SGLang's and the overlay's files.
  type: str
  returned: always
place:
  description: Names the folder on its machine; two names of one host have the same.
  type: str
  returned: always
"""


def main() -> None:
    """Run the bundle and hand its answers to Ansible."""
    names = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "str", "required": True},
            "bundle": {"type": "path", "required": True},
            "allowed_signers": {"type": "path"},
            "signer": {"type": "str"},
            "sha256": {"type": "str"},
            "python": {"type": "str"},
            "expect": {"type": "str", "choices": ["patched", "pristine"]},
            "plan": {"type": "str", "choices": ["patched", "pristine"]},
            "require": names,
            "skip": names,
            "free_mib": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    given = module.params
    result: dict[str, Any] = {"changed": False}

    def ask(*words: str) -> tuple[int, dict[str, Any]]:
        code, document = bundle.ask(
            Path(given["bundle"]),
            given["sha256"] or "",
            [words[0], "--target", given["target"], *words[1:]],
            python=given["python"] or sys.executable,
        )
        return code, dict(document)

    try:
        code, status = ask("status")
        result["overlay"] = status
        if code != 0:
            module.fail_json(msg=bundle.faults(status), **result)
        site = Path(str(status["target"]))
        result.update(
            fingerprint=tree.fingerprint(site), digest=tree.digest(site), place=tree.place(site)
        )
        free = bundle.free_bytes(site) >> 20
        if free < given["free_mib"]:
            module.fail_json(
                msg=f"{free} MiB are free at {site}, {given['free_mib']} are needed", **result
            )
        if given["plan"]:
            verb = "apply" if given["plan"] == "patched" else "revert"
            code, result["plan"] = ask(verb, "--check")
            if code != 0:
                module.fail_json(msg=bundle.faults(result["plan"]), **result)
        pristine = "pristine" if status["state_after"] == "pristine" else None
        expect = given["expect"] or (given["plan"] and pristine)
        if expect:
            options = [f"--require={','.join(given['require'])}"] if given["require"] else []
            options += [f"--skip={','.join(given['skip'])}"] if given["skip"] else []
            code, verdict = ask("verify", "--expect", expect, *options)
            result["verify"] = verdict
            if code != 0:
                module.fail_json(msg=bundle.faults(verdict), **result)
    except bundle.BundleFault as fault:
        module.fail_json(msg=str(fault), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
