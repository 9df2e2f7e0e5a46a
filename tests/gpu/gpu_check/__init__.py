"""What tests/gpu_check.sh runs: parts of a check, each in a process of its own with a budget of time, and one table of them all."""
