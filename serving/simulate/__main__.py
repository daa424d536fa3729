"""`python -m serving.simulate`: see ``command``."""

import sys

from serving.simulate.command import main

if __name__ == "__main__":
    sys.exit(main())
