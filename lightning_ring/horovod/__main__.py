"""``python -m lightning_ring.horovod script.py``: run a script for Horovod as it is, over the
ring.
"""

import sys

from lightning_ring.horovod.as_horovod import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
