"""``python -m draftwise``: the same as the ``draftwise`` command."""

import sys

from draftwise.cli.main import main

sys.exit(main())
