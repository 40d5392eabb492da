import sys
from pathlib import Path

# The tests share builders of tiny models and rows in `tiny.py`, beside them.
sys.path.insert(0, str(Path(__file__).parent))
