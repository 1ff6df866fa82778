"""Ground-truth labels: what the model itself says when probed."""

from mdmi_fast.labels.aggregate import aggregate_mi
from mdmi_fast.labels.masking import FixedShare, Masking, Trajectory, UniformShare
from mdmi_fast.labels.options import FORMS, Form
from mdmi_fast.labels.probe import label_mi, probe_mi
from mdmi_fast.labels.results import MILabels, Probe, masked_pairs
from mdmi_fast.labels.shards import LabelledState
from mdmi_fast.labels.store import LabelSet, SequenceError, read_labels, stream_labels, write_labels

__all__ = [
    "FORMS",
    "FixedShare",
    "Form",
    "LabelSet",
    "LabelledState",
    "MILabels",
    "Masking",
    "Probe",
    "SequenceError",
    "Trajectory",
    "UniformShare",
    "aggregate_mi",
    "label_mi",
    "masked_pairs",
    "probe_mi",
    "read_labels",
    "stream_labels",
    "write_labels",
]
