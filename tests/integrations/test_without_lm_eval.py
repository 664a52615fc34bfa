"""What our part for lm_eval says where the package is missing."""

from __future__ import annotations

import importlib
import re
import sys

import pytest


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "trainshort.integrations.lm_eval", raising=False)
    with pytest.raises(ImportError, match=re.escape("pip install 'trainshort[lm_eval]'")):
        importlib.import_module("trainshort.integrations.lm_eval")
