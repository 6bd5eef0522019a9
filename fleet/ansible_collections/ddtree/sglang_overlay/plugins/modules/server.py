"""Wait for a live SGLang server to be idle, or to serve as it should."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import server

DOCUMENTATION = r"""
module: server
short_description: Wait for a live SGLang server to be idle, or to serve as it should
version_added: "0.1.0"
description:
  - Asks the server over HTTP, from the host it runs on.
  - C(idle) waits until no request runs or waits. C(serving) is the gate - readiness, the live
    identity equal to O(fingerprint), and real generations compared with O(golden). C(seen) only
    tells.
author: DDTree overlay developers (@ddtree)
options:
  url:
    description: The server's URL as seen from its host.
    type: str
    required: true
  wait_for:
    description: What to wait for.
    type: str
    choices: [idle, serving, seen]
    required: true
  limit:
    description: How many seconds to wait.
    type: float
    default: 600
  timeout:
    description: How many seconds one request may take.
    type: float
    default: 60
  fingerprint:
    description: The fingerprint of the overlay on the disk; empty if there must be no overlay.
    type: str
    default: ""
  golden:
    description:
      - The recorded answers of stock SGLang, as C(fleet record) writes them.
      - With O(wait_for=seen) they are not asked for, and refused where they are no gate.
    type: dict
  api_key:
    description: The server's key, if it asks for one.
    type: str
attributes:
  check_mode:
    description: It never changes anything; it asks in check mode too.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Wait until the server is idle
  ddtree.sglang_overlay.server:
    url: http://127.0.0.1:30000
    wait_for: idle
"""

RETURN = r"""
ready:
  description: Whether the server is healthy.
  type: bool
  returned: if O(wait_for=seen)
identities:
  description: The overlay's identity of each scheduler, null where it runs none.
  type: list
  elements: dict
  returned: if O(wait_for=seen) and it is ready
agreed:
  description: How many generations were the recorded ones.
  type: str
  returned: if O(wait_for=serving)
"""


def main() -> None:
    """Ask the server and hand its answers to Ansible."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "wait_for": {"type": "str", "choices": ["idle", "serving", "seen"], "required": True},
            "limit": {"type": "float", "default": 600},
            "timeout": {"type": "float", "default": 60},
            "fingerprint": {"type": "str", "default": ""},
            "golden": {"type": "dict"},
            "api_key": {"type": "str", "no_log": True},
        },
        required_if=[("wait_for", "serving", ["golden"])],
        supports_check_mode=True,
    )
    given = module.params
    live = server.Server(given["url"].rstrip("/"), given["api_key"], given["timeout"])
    result: dict[str, object] = {"changed": False}
    try:
        if given["wait_for"] == "idle":
            server.wait_idle(live, limit=given["limit"])
        elif given["wait_for"] == "seen":
            if given["golden"] is not None:
                server.check_golden(given["golden"])
            result["ready"] = live.ready()
            result["identities"] = live.identities() if result["ready"] else []
        else:
            server.wait_ready(live, limit=given["limit"])
            server.check_identity(live, given["fingerprint"] or None)
            result["agreed"] = server.check_answers(live, given["golden"])
    except server.ServerFault as fault:
        module.fail_json(msg=str(fault), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
