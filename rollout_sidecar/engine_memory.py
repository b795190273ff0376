"""The engine's own memory: given up for a trainer on the same device and taken back, and compared with what was pushed.

    rollouts ▸ POST /v1/engine/release ▸ update ▸ POST /v1/engine/resume ▸ push of weights ▸ rollouts

What is generating when the memory goes waits with the tokens that it has, and goes on from them under the new version.
From the release to the end of the push the sidecar is not ready, and says why. The host copy of the weights stays: a
delta is enough to fill the engine again.
"""

import asyncio
from collections.abc import Mapping

import xxhash

from rollout_sidecar.engines.base import Engine, WeightTensor
from rollout_sidecar.errors import RequestError
from rollout_sidecar.protocol import EngineMemory, ServedWeights
from rollout_sidecar.weights import WeightStore


async def release_memory(engine: Engine, weights: WeightStore) -> EngineMemory:
    """Frees the device's memory. Released already, it changes nothing. RequestError 409 if this engine cannot."""
    async with weights.alone():
        try:
            await engine.release_memory()
        except NotImplementedError as error:
            raise RequestError(409, "cannot_release", str(error)) from error
        return EngineMemory(released=True, fault=engine.fault)


async def resume_memory(engine: Engine, weights: WeightStore) -> EngineMemory:
    """Takes it again, for the push that must follow. With nothing released, it changes nothing."""
    async with weights.alone():
        await engine.resume_memory()
        return EngineMemory(released=False, fault=engine.fault)


async def served_weights(engine: Engine, weights: WeightStore) -> ServedWeights:
    """What is being served, tensor by tensor, and what the engine holds otherwise. Reads every weight.

    RequestError 409 if nothing was pushed yet, or a push is under way.
    """
    async with weights.alone():
        tensors = weights.tensors()
        if tensors is None:
            raise RequestError(
                409,
                "no_weights",
                "no weights were pushed yet, or a push is under way; ask again after it",
            )
        return ServedWeights(
            version=engine.policy_version,
            content_hash=weights.content_hash,
            hashes=await asyncio.to_thread(_hashes, tensors),
            altered=await engine.altered_tensors(tensors),
        )


def _hashes(tensors: Mapping[str, WeightTensor]) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(tensor.data) for name, tensor in tensors.items()}
