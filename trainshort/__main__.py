"""`python -m trainshort`: the command line."""

from trainshort.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
