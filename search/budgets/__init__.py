"""Several budgets in one go: how many experts, after where they belong."""
