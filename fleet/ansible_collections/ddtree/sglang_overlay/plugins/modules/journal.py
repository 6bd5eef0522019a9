"""Keep the journal of a host that is being changed."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ddtree.sglang_overlay.plugins.module_utils import journal, tree

DOCUMENTATION = r"""
module: journal
short_description: Keep the journal of a host that is being changed
version_added: "0.1.0"
description:
  - One run at a time may change a host; it holds a lease that every phase renews.
  - What the journal notes as before is what a rollback goes back to. A later run that finds the
    journal of a lost one goes on with it.
  - The journal is no part of the change that is rolled out, so C(changed) is always false.
author: DDTree overlay developers (@ddtree)
options:
  folder:
    description: Where journals are kept on the host.
    type: path
    required: true
  target:
    description: The target that is being changed.
    type: str
    required: true
  run:
    description: Names the rollout.
    type: str
    required: true
  action:
    description:
      - What to do. C(free) only checks that no other run is at work.
      - C(note) takes down O(phase) and renews the lease. C(own) does so for a rollback, which goes
        on where the renewal cannot be written. Both fail where another run has taken the host.
    type: str
    choices: [free, open, note, own, close]
    required: true
  phase:
    description: The phase that begins.
    type: str
    default: ""
  before:
    description: With O(action=open), what is known of the host as it is.
    type: dict
    default: {}
  site:
    description:
      - With O(action=note), note the digest of this site-packages folder too.
      - With O(action=open), fail where its overlay is not O(fingerprint) any more.
    type: path
  fingerprint:
    description: The fingerprint of the overlay on the disk as it was seen; empty if there was none.
    type: str
    default: ""
  lease:
    description: How many seconds the next phase may take.
    type: float
    default: 1800
  take_over:
    description: Go on although another run's lease has not ended.
    type: bool
    default: false
attributes:
  check_mode:
    description: Only O(action=free) does anything in check mode.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: See whether another rollout is at work
  ddtree.sglang_overlay.journal:
    folder: /var/lib/sglang-overlay
    target: /opt/venv
    run: 2026-11-30T10:00:00Z
    action: free
"""

RETURN = r"""
journal:
  description: The journal as it is now, null if there is none.
  type: dict
  returned: always
"""


def main() -> None:
    """Do what is asked for and hand the journal to Ansible."""
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "required": True},
            "target": {"type": "str", "required": True},
            "run": {"type": "str", "required": True},
            "action": {
                "type": "str",
                "choices": ["free", "open", "note", "own", "close"],
                "required": True,
            },
            "phase": {"type": "str", "default": ""},
            "before": {"type": "dict", "default": {}},
            "site": {"type": "path"},
            "fingerprint": {"type": "str", "default": ""},
            "lease": {"type": "float", "default": 1800},
            "take_over": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    kept = journal.Journal(Path(given["folder"]), given["target"])
    run, take_over, lease = given["run"], given["take_over"], given["lease"]
    document = None
    try:
        if given["action"] == "free":
            document = kept.check_free(run, take_over=take_over)
        elif module.check_mode:
            pass
        elif given["action"] == "open":
            site, seen = given["site"], given["fingerprint"] or None
            document = kept.open(
                run,
                given["before"],
                lease=lease,
                take_over=take_over,
                same=lambda: not site or tree.fingerprint(Path(site)) == seen,
            )
        elif given["action"] == "note":
            known = {"digest": tree.digest(Path(given["site"]))} if given["site"] else {}
            document = kept.note(run, given["phase"], lease=lease, **known)
        elif given["action"] == "own":
            document = kept.own(run, given["phase"], lease=lease)
        else:
            kept.close(run)
    except journal.JournalFault as fault:
        module.fail_json(msg=str(fault))
    module.exit_json(changed=False, journal=document)


if __name__ == "__main__":
    main()
