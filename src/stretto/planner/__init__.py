"""Predicts a plan's time and memory, and chooses a plan, before anything is launched. Pure: no process, no device."""

from __future__ import annotations

from stretto.planner.constants import MEANINGS, Constants, find_constants
from stretto.planner.hardware import Device, Machines, find_device
from stretto.planner.setups import Setups
from stretto.planner.step import StepTime, step_time
from stretto.planner.transformer import Transformer

__all__ = [
    "MEANINGS",
    "Constants",
    "Device",
    "Machines",
    "Setups",
    "StepTime",
    "Transformer",
    "find_constants",
    "find_device",
    "step_time",
]
