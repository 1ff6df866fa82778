"""Sudoku: a real masked-decoding task small enough to measure everything on. Import what you need from its modules."""
