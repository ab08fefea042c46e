"""``python -m lightning_ring.horovod script.py`` runs a Horovod script over the ring."""

import sys

from lightning_ring.horovod.as_horovod import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
