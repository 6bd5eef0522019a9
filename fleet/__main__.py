"""``python3 fleet COMMAND …``: the rollout over OpenSSH, without Ansible."""

from openssh.cli import main

if __name__ == "__main__":
    main()
