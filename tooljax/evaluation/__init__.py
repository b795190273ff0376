"""What `tooljax.evaluate` makes of trajectories: numbers with intervals, comparisons, and a report."""
