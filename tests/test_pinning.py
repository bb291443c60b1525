"""Memory is pinned where it lies by CUDA's own calls, here those of a stand-in."""

from __future__ import annotations

import contextlib

import pytest
import torch

from torchfast._core.pinning import pin_in_place

CPU = torch.device("cpu")


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_registered_and_given_back(monkeypatch, code):
    calls = []

    class Runtime:
        def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802 - CUDA's name
            calls.append(("register", address, num_bytes, flags))
            return code

        def cudaHostUnregister(self, address):  # noqa: N802
            calls.append(("unregister", address))

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    found, unpin = pin_in_place(4096, 100, CPU)
    assert found == code
    assert calls == [("register", 4096, 100, 1)]
    unpin()
    assert calls[1:] == [("unregister", 4096)]
