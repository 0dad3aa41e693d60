"""Launch target for torchrun, deepspeed and plain python; the same stages as the `sd3-light` command."""

import sys

from sd3_light.cli import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
