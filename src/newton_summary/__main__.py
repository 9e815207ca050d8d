"""``python -m newton_summary`` is the command ``newton-summary``."""

import sys

from newton_summary.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
