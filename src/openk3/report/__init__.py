"""Run reports and plots."""
