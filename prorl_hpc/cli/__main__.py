"""`python -m prorl_hpc.cli`: the same as `prorl-hpc`."""

import sys

from prorl_hpc.cli.main import main

sys.exit(main())
