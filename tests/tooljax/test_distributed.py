"""Which process of a run this is, by config and environment."""

import pytest

from tooljax.config.schema import MeshConfig
from tooljax.distributed import DETECTED, Place, is_alone, is_first, place_of

JAX = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {"SLURM_JOB_ID": "4100", "SLURM_NTASKS": "8", "SLURM_PROCID": "5"}
AUTO = MeshConfig(coordinator="auto")


def test_without_a_coordinator_there_is_one_process():
    assert place_of(MeshConfig(), JAX | SLURM) is None
    assert is_first()
    assert is_alone()


def test_the_config_alone_is_enough():
    mesh = MeshConfig(coordinator="host:99", processes=2, process_id=0)
    assert place_of(mesh, {}) == Place("host:99", 2, 0)
    assert place_of(mesh, JAX) == Place("host:99", 2, 0)


def test_what_the_config_leaves_open_the_environment_says():
    assert place_of(AUTO, JAX) == Place("a:1234", 4, 3)
    assert place_of(MeshConfig(coordinator="b:5"), JAX) == Place("b:5", 4, 3)


def test_kubernetes_numbers_the_pods_of_an_indexed_job():
    environment = {name: JAX[name] for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES")}
    assert place_of(AUTO, environment | {"JOB_COMPLETION_INDEX": "2"}) == Place("a:1234", 4, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("tpu1", "tpu1"),
        ("node001,host2", "node001"),
        ("node[007-015],host2", "node007"),
        ("gpu-a[3,9]", "gpu-a3"),
    ],
)
def test_slurm_names_the_first_host_and_the_port_follows_from_the_job(nodes, first):
    # 61440 + 4100 % 4096
    place = place_of(AUTO, SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert place == Place(f"{first}:61444", 8, 5)


def test_elsewhere_jax_is_asked():
    assert place_of(AUTO, {"TPU_WORKER_ID": "0"}) == Place(DETECTED)


@pytest.mark.parametrize(
    ("mesh", "environment", "sentence"),
    [
        (MeshConfig(coordinator="host"), {}, r"'host' is no host:port; name process 0's host"),
        (AUTO, SLURM, r"SLURM_STEP_NODELIST is not set: start the trainer with srun"),
        (
            MeshConfig(coordinator="a:1"),
            {},
            r"mesh.processes is not, and neither is JAX_NUM_PROCESSES or SLURM_NTASKS; set one",
        ),
        (
            MeshConfig(coordinator="a:1", processes=2),
            {},
            r"mesh.process_id is not, and neither is JAX_PROCESS_ID or SLURM_PROCID or JOB_COMP",
        ),
        (AUTO, JAX | {"JAX_PROCESS_ID": "-1"}, r"JAX_PROCESS_ID='-1' is no number from 0"),
        (
            MeshConfig(coordinator="a:1", processes=2, process_id=2),
            {},
            r"this is process 2 of 2, but they are numbered from 0: mend mesh.processes",
        ),
    ],
)
def test_what_is_missing_is_named(mesh, environment, sentence):
    with pytest.raises(ValueError, match=sentence):
        place_of(mesh, environment)
