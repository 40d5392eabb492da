"""D3: compiled autograd that one thread turns on compiles the backwards of all. See `--help`."""

import sys
from pathlib import Path

# Runs from a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compile_guard.hazards._runner import main

if __name__ == "__main__":
    raise SystemExit(main([Path(__file__).stem, *sys.argv[1:]]))
