"""What people see in their terminal: options, errors, progress, results; and Ctrl-C."""
