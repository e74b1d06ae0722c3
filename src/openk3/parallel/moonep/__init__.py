"""Perfectly balanced expert parallelism (K3 report §5.2.1, app. E)."""

from openk3.parallel.moonep.plan import Plan, plan

__all__ = ["Plan", "plan"]
