"""The command line called in this process, with what it printed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainshort.cli.main import main


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    error: str

    def one_sentence(self) -> str:
        """The error, which is one line and no traceback."""
        assert self.status != 0
        assert "Traceback" not in self.error
        assert len(self.error.strip().splitlines()) == 1, self.error
        return self.error.strip()


def run_cli(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    capsys.readouterr()
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return Outcome(status, captured.out, captured.err)
