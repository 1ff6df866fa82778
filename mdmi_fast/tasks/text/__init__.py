"""Text by characters: a small masked model of the King James Bible, trained in minutes, and what it is asked to fill."""
