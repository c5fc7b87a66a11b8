"""Imported by the process that forks workers, so that each worker starts with everything loaded."""

from simulation.campaign import quiet_logs
from simulation.engine.system import preload

preload()
quiet_logs()
