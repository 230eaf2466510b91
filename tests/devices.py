"""What tests of servers compute on: the device that TRIMMOE_TEST_DEVICE names, or the processor.

Answers are compared to those of transformers on the processor, in float32.
"""

from __future__ import annotations

import os

import pytest

from trimmoe.models.load import known_device

DEVICE = known_device(os.environ.get("TRIMMOE_TEST_DEVICE", "cpu"))
ON_DEVICE = [] if DEVICE.type == "cpu" else ["--device", str(DEVICE), "--dtype", "float32"]
"""What `serve` is told of it."""
copies = pytest.mark.skipif(DEVICE.type != "cpu", reason="copies in few bits are for processors")
