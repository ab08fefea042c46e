"""A Hydra application that starts two ranks of itself, as the launcher does, without Lightning's
seconds of import.
"""

import os
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig

from lightning_ring.launch.rerun import own_command
from lightning_ring.launch.start import plain_job


@hydra.main(version_base=None, config_path=None, config_name=None)
def main(config):
    output = HydraConfig.get().runtime.output_dir
    if "RING_RANK" not in os.environ:
        with own_command() as command:
            assert plain_job(2, command, os.environ).run() == 0
        Path(config.folder, f"parent.{config.lr}").write_text(output)
        return
    Path(config.folder, f"{config.lr}.{os.environ['RING_RANK']}").write_text(
        f"{output} {config.begun} {os.getcwd()}"
    )


if __name__ == "__main__":
    main()
