"""The kernels for TPUs: interpreted on a CPU, exported, compiled ahead of time where libtpu is, and on a TPU."""

from token_log_probs_cases import TokenLogProbsCases, over_shapes

from pallas_kernels.token_log_probs import tpu
from pallas_kernels.token_log_probs.mosaic import Tiles

pytest_generate_tests = over_shapes

TILES = Tiles(block=128, columns=128, resident=256)


class TestInterpreted(TokenLogProbsCases):
    implementation = "tpu"
    bends = False

    def context(self):
        return tpu.compiled_for(tpu.Device("TPU v5 lite", interpret=True, tiles=TILES))
