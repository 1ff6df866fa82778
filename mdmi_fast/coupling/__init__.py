"""Tokens of one pass that know each other: drawn one after the other, each corrected by what was drawn before."""

from mdmi_fast.coupling.evaluate import CouplingReport, Share, evaluate_coupling
from mdmi_fast.coupling.learned import LearnedCoupling
from mdmi_fast.coupling.network import PairwiseCoupling, load_coupling
from mdmi_fast.coupling.train import CouplingProgress, train_coupling
from mdmi_fast.coupling.trajectories import Trajectories, draw_trajectories
from mdmi_fast.decoding.coupling import CoupledPass, Coupling

__all__ = [
    "CoupledPass",
    "Coupling",
    "CouplingProgress",
    "CouplingReport",
    "LearnedCoupling",
    "PairwiseCoupling",
    "Share",
    "Trajectories",
    "draw_trajectories",
    "evaluate_coupling",
    "load_coupling",
    "train_coupling",
]
