"""Estimators: small networks that predict pairwise mutual information from hidden states."""

from mdmi_fast.estimator.evaluate import Evaluation, evaluate_estimator, evaluate_splits
from mdmi_fast.estimator.general import PairwiseMIEstimator
from mdmi_fast.estimator.layers import Head, RowLayers
from mdmi_fast.estimator.loading import load_estimator
from mdmi_fast.estimator.report import JudgedStates, PairReport
from mdmi_fast.estimator.scorer import PairScorer, ShippedScorer
from mdmi_fast.estimator.seen import SeenStates
from mdmi_fast.estimator.table import DistanceTable
from mdmi_fast.estimator.train import TrainingProgress, train_estimator
from mdmi_fast.estimator.window import Windowed

__all__ = [
    "DistanceTable",
    "Evaluation",
    "Head",
    "JudgedStates",
    "PairReport",
    "PairScorer",
    "PairwiseMIEstimator",
    "RowLayers",
    "SeenStates",
    "ShippedScorer",
    "TrainingProgress",
    "Windowed",
    "evaluate_estimator",
    "evaluate_splits",
    "load_estimator",
    "train_estimator",
]
