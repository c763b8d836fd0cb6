"""`python -m alignedserve`."""

import sys

from alignedserve.cli import main

sys.exit(main())
