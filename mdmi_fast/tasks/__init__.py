"""The tasks of the demo: data, model and score of each."""
