"""`python -m pyorch` is `sparq-cpp`."""

from pyorch.cli import main

if __name__ == "__main__":
    main()
