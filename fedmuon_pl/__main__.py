"""``python -m fedmuon_pl`` is the command ``fedmuon``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
