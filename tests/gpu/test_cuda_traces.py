"""Traces on a GPU: moments are events, and nothing waits for the device."""

import pytest
import torch

from distca_hf.runtime.pending_traces import NotedPass
from distca_hf.traces import PassPart, Spent


@pytest.mark.gpu
def test_moments_are_read_once_the_device_has_passed_them() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    x @ x
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        noted = NotedPass(device)
        noted.begin(PassPart.FORWARD, 0, 0)
        torch.cuda._sleep(200_000_000)  # a tenth of a second of the device
        noted.spent(Spent.LOCAL)
        x @ x
        noted.spent(Spent.REMOTE)
        noted.end_forward(0)
        had_passed = noted.is_complete
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    (call,) = noted.calls()
    (first, local_us), (second, remote_us) = call.spans

    assert not had_passed
    assert noted.is_complete
    assert (first, second) == (Spent.LOCAL, Spent.REMOTE)
    assert local_us > 20_000 > remote_us > 0
    assert noted.seconds == pytest.approx((call.begin_us + local_us + remote_us) / 1e6, abs=1e-4)
