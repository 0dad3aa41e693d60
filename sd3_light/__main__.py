"""`python -m sd3_light`: the `sd3-light` command, also under torchrun. The package itself starts `python -P` with this
file, which does not import from the working directory as `python -m` does."""

import sys
from pathlib import Path

if not __package__ and (parent := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, parent)  # a checkout that is not installed

from sd3_light.cli import main

if __name__ == "__main__":
    main()
