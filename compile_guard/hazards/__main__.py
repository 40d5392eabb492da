"""`python -m compile_guard.hazards NAME` runs one entry; `--table` runs all and prints what docs/hazards.md shows."""

from compile_guard.hazards._runner import main

if __name__ == "__main__":
    raise SystemExit(main())
