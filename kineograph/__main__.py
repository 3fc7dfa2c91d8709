"""`python -m kineograph`, and what torchrun starts: the same as `kineo`."""

from kineograph.cli import main

if __name__ == "__main__":
    main()
