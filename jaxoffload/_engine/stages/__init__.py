"""Run layers on pipeline stages: schedule, ticks, and the exchange between stages."""
