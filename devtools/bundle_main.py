"""The one-file bundle's entry point: ``sglang-overlay.pyz apply|revert|status|verify …``."""

import sys

from patcher import prerequisites

USAGE = """usage: sglang-overlay.pyz COMMAND [OPTIONS]

  apply   apply the overlay to an installed SGLang (options of apply.py)
  revert  take it off, byte for byte
  status  say what the target is
  verify  check what is on the disk (options of verify_install.py)

`sglang-overlay.pyz COMMAND --help` lists the options."""


def main() -> int:
    """Hand the arguments to the command that was asked for."""
    prerequisites.demand()
    if sys.argv[1:2] == ["--version"]:
        sys.argv[1:] = ["status", "--version"]
    command, options = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command in {"apply", "revert", "status"}:
        import apply

        flag = [] if command == "apply" else [f"--{command}"]
        sys.argv = [f"{sys.argv[0]} {command}", *flag, *options]
        return apply.run()
    if command == "verify":
        import verify_install

        sys.argv = [f"{sys.argv[0]} verify", *options]
        return verify_install.run()
    asked = command in {"-h", "--help"}
    (sys.stdout if asked else sys.stderr).write(USAGE + "\n")
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
