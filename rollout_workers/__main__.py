"""``python -m rollout_workers``."""

from rollout_workers.cli import main

main()
