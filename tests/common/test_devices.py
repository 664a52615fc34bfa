"""Devices by name, and one sentence for those that are not there."""

from __future__ import annotations

import pytest
import torch

from trainshort.common.devices import device_for


def test_without_a_name_it_is_the_gpu_where_there_is_one() -> None:
    assert device_for(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_named_one() -> None:
    assert device_for("cpu") == torch.device("cpu")


def test_names_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match=r"^device must be cpu, cuda or cuda:N; got 'abacus'$"):
        device_for("abacus")
    with pytest.raises(ValueError, match=r"^device must be auto or cpu; got 'abacus'$"):
        device_for("abacus", allowed="auto or cpu")


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device 'cuda': torch finds no GPU here; leave device \(--device\) out"):
        device_for("cuda")

    def refuses(*size: int, device: torch.device) -> None:
        raise RuntimeError(f"no {device} here")

    monkeypatch.setattr(torch, "empty", refuses)
    with pytest.raises(ValueError, match=r"^device must be cpu, cuda or cuda:N; got 'mps' \(no mps here\)$"):
        device_for("mps")
