"""Ground-truth labels: what the model itself says when probed."""

from mdmi_fast.labels.plan import FORMS, Form
from mdmi_fast.labels.probe import MILabels, Probe, label_mi, masked_pairs, probe_mi
from mdmi_fast.labels.store import LabelSet, read_labels, write_labels

__all__ = [
    "FORMS",
    "Form",
    "LabelSet",
    "MILabels",
    "Probe",
    "label_mi",
    "masked_pairs",
    "probe_mi",
    "read_labels",
    "write_labels",
]
