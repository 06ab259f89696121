"""What a study shows: the report, its figures, the dashboard, and the findings behind them."""
