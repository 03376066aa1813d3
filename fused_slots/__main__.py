"""`python -m fused_slots`: the command line, also from a checkout that is not installed."""

import sys

from fused_slots.cli import main

if __name__ == "__main__":
    sys.exit(main())
