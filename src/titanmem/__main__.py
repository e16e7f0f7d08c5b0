"""`python -m titanmem`."""

import sys

from titanmem.cli import main

sys.exit(main())
