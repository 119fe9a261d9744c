"""`python3 -m minillm.bench STEP`."""

import sys

from minillm.bench.main import main

sys.exit(main())
