"""`python -m trainshort` is `trainshort`."""

import sys

from trainshort.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
