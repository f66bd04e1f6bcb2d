"""Simulated backends whose state is plain data, and the problems that are set in them."""

from collections.abc import Mapping
from types import MappingProxyType

from prorl_hpc.tasks.tools.worlds import bank, calendar, shop, tracker
from prorl_hpc.tasks.tools.worlds.base import Setting

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "bank": bank.SETTING,
        "calendar": calendar.SETTING,
        "shop": shop.SETTING,
        "tracker": tracker.SETTING,
    }
)
"""Every world that problems can be set in."""

__all__ = ["SETTINGS"]
