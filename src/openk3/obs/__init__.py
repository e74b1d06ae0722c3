"""Logs, metrics and run folders. Imports no torch."""

from openk3.obs.console import Console
from openk3.obs.metrics import MetricsWriter, read_rows
from openk3.obs.progress import Progress
from openk3.obs.run import RunFolder

__all__ = ["Console", "MetricsWriter", "Progress", "RunFolder", "read_rows"]
