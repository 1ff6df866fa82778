"""The "cpp" backend: thin wrappers that hand addresses and strides of CPU tensors to the extension `mdmi_fast._C`.

Importing this package raises ImportError where the extension was not built.
"""

from mdmi_fast import _C as _C
