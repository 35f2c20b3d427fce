"""`python -m bothways`, which is also what torchrun starts."""

from bothways.cli.main import main

if __name__ == "__main__":
    main()
