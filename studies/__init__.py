"""What is recorded: studies, their trials and what follows from them (Optuna, no torch)."""
