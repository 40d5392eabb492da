"""`python -m compile_guard`: the command `compile-guard`."""

from compile_guard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
