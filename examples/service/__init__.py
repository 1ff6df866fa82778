"""A small service around `decode`: dynamic batches, deadlines, backpressure, workers that may die."""
