"""B6: fullgraph=True: no compiled frames in a compiled call, eager runs beside it. See `--help`."""

import sys
from pathlib import Path

# Runs from a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compile_guard.hazards._runner import main

if __name__ == "__main__":
    raise SystemExit(main([Path(__file__).stem, *sys.argv[1:]]))
