"""`python -m openk3` is the `k3` command."""

from openk3.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
