"""`python -m sd3_light`: the `sd3-light` command, also under torchrun."""

from sd3_light.cli import main

if __name__ == "__main__":
    main()
