"""Spark's TorchDistributor starts the ranks, on the driver's host and in the tasks of a barrier."""

import io
import sys
from pathlib import Path

import pytest

from tests.engines.loops import weights_of_ddp
from tests.processes import ROOT

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'lightning-ring[spark]'")

pytestmark = [pytest.mark.engines, pytest.mark.ranks]
IMAGES = 16


@pytest.fixture(scope="module")
def spark():
    """A cluster of two workers, each a process with one core."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    options = {
        "spark.ui.enabled": "false",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executorEnv.OMP_NUM_THREADS": "1",
    }
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        # These JVMs live for seconds: optimized code would cost more than it saves.
        patch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        # else each JVM asks a name server for this host
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("SPARK_LOCAL_HOSTNAME", "localhost")
        try:
            session = builder.getOrCreate()
        except PySparkRuntimeError as error:
            pytest.skip(f"Spark needs Java: {error}")
        yield session
        session.stop()


@pytest.fixture(scope="module")
def parquet(spark, tmp_path_factory):
    """A DataFrame of JPEGs and labels, as Spark writes it."""
    from PIL import Image

    rows = []
    for number in range(IMAGES):
        jpeg = io.BytesIO()
        Image.new("RGB", (16, 16), (number * 10, 0, 0)).save(jpeg, "JPEG")
        rows.append((bytearray(jpeg.getvalue()), number % 2))
    folder = tmp_path_factory.mktemp("images") / "parquet"
    spark.createDataFrame(rows, "image binary, label int").write.parquet(str(folder))
    return folder


def _fit(parquet):
    """On each rank; Spark hands back what one of them returns."""
    from datasets import Dataset

    from lightning_ring.data import CenterCrop, HuggingFaceImages, ShuffledSampler, image_loader
    from tests.engines.loops import trained

    said = trained("ring", devices="auto")
    files = [str(file) for file in sorted(Path(parquet).glob("*.parquet"))]
    images = HuggingFaceImages(Dataset.from_parquet(files, cache_dir=f"{parquet}-{said['rank']}"))
    sampler = ShuffledSampler(len(images), rank=said["rank"], world_size=said["world_size"])
    batches = image_loader(images, sampler, 4, crop=CenterCrop(16), transform=None)
    return said | {"images": sum(len(pixels) for pixels, _ in batches)}


def test_a_fit_has_the_bits_of_ddp_on_one_host_and_in_a_barrier(spark, parquet, tmp_path):
    from pyspark.ml.torch.distributor import TorchDistributor

    of_ddp = weights_of_ddp(tmp_path / "ddp")
    for local_mode in (False, True):
        distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
        said = distributor.run(_fit, str(parquet))
        assert (said["world_size"], said["source"]) == (2, "torchrun")
        assert said["images"] == IMAGES // 2
        assert said["weights"] == of_ddp
