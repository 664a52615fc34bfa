"""`python -m trainshort` is `trainshort`."""

from trainshort.cli.main import start

if __name__ == "__main__":
    start()
