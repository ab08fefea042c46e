"""A Hydra application whose ranks are plain processes; each writes what it was configured with."""

import os
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_ring.environment import RingEnvironment
from lightning_ring.launcher import JobFinished, RingLauncher


@hydra.main(version_base=None, config_path=None, config_name=None)
def main(config: DictConfig) -> None:
    environment = RingEnvironment()
    launcher = RingLauncher(environment, num_processes=2, num_nodes=1, use_mpi=False)
    try:
        launcher.launch(lambda: write(config, environment.global_rank()))
    except JobFinished as job:
        if job.code:
            raise
        Path(config.folder, f"parent.{config.lr}").write_text(HydraConfig.get().runtime.output_dir)


def write(config: DictConfig, rank: int) -> None:
    output = Path(HydraConfig.get().runtime.output_dir)
    Path(config.folder, f"{config.lr}.{rank}").write_text(f"{output} {config.begun} {os.getcwd()}")


if __name__ == "__main__":
    main()
