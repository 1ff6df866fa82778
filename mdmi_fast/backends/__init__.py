"""The backends, one folder each: the same stems, for the same calls. `mdmi_fast.reference` is what they are held to."""
