#!/bin/bash
# The trainer on all hosts of a Cloud TPU slice, one process a host: here v5e with 16 chips on 4 hosts. Not run yet.
#
# Needs gcloud, and a folder that all hosts see, /mnt/shared, for run.dir, model and data (Filestore, or a bucket by
# gcsfuse). Sidecars run on GPU machines: configs/arithmetic_smollm2_tpu.gin says how. Started again, it goes on.
set -euo pipefail

NAME=tooljax ZONE=us-west4-a

gcloud compute tpus tpu-vm describe "$NAME" --zone "$ZONE" > /dev/null ||
  gcloud compute tpus tpu-vm create "$NAME" --zone "$ZONE" \
    --accelerator-type v5litepod-16 --version v2-alpha-tpuv5-lite

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker all --command "$1"
}

gcloud compute tpus tpu-vm scp --recurse --worker all --zone "$ZONE" . "$NAME":tooljax
on_all_hosts "cd tooljax && python -m pip install '.[tpu]'"
on_all_hosts "cd tooljax &&
  python -m tooljax.train --config configs/arithmetic_smollm2_tpu.gin --set mesh.coordinator=auto \
    --set batch.rows_per_microbatch=16 --set run.dir=/mnt/shared/runs/tpu --set model.path=/mnt/shared/sft"
