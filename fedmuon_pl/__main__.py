"""``python -m fedmuon_pl`` is the command ``fedmuon``."""

import sys

from .cli import command

if __name__ == "__main__":
    sys.exit(command())
