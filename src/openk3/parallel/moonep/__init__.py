"""Perfectly balanced expert parallelism (K3 report §5.2.1, app. E)."""

from openk3.parallel.moonep.dispatch import MoonEPDispatcher
from openk3.parallel.moonep.planner import Plan, plan

__all__ = ["MoonEPDispatcher", "Plan", "plan"]
