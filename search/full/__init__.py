"""Full fine-tunes, by one process or by the workers, and what they say of allocations."""
