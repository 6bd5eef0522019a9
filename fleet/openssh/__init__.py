"""Status, apply and revert on a list of hosts over the system's OpenSSH, with the same canary."""
