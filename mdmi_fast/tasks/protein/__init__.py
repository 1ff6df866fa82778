"""Antibody heavy chains: real ones, what a model is asked to fill in them, and how good the answers are."""
