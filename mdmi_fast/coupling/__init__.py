"""Tokens of one pass that know each other: drawn one after the other, each corrected by what was drawn before."""

from mdmi_fast.coupling.base import CoupledPass, Coupling

__all__ = ["CoupledPass", "Coupling"]
