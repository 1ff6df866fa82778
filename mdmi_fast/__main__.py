"""`python -m mdmi_fast` is `mdmi-fast`."""

import sys

from mdmi_fast.cli import main

sys.exit(main())
