#!/usr/bin/env bash
# Pre-training on several machines under Slurm: one task for each GPU. Change the lines with "# ←".
#
#   sbatch deploy/training/slurm.sh
#
# Ten minutes before the end of its time the job gets SIGUSR1, saves, and is queued again until the
# run is finished. A job that is taken away (SIGTERM) or whose machine fails continues in the same way.
#SBATCH --job-name=bothways
#SBATCH --nodes=2                     # ←
#SBATCH --ntasks-per-node=8           # ← GPUs of a machine
#SBATCH --gpus-per-node=8             # ←
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=bothways-%j.log
set -uo pipefail

CORPUS=/data/corpus                   # ← a folder that all machines see
OUT=/data/runs/my-run                 # ← the same
SETTINGS=(--model bert-base training.until="100000 steps" training.save="30 minutes" training.step_limit=1800)

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500 CORPUS OUT

# Since Slurm 22.05, srun takes the number of processors from its own option alone.
# A task that fails ends the others, which could not go on. One that is finished does not (--wait=0),
# whatever WaitTime of the cluster is: the first task may still be writing the model.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
    exec python -m bothways pretrain "$CORPUS" --out "$OUT" --resume "$@"
' _ "${SETTINGS[@]}"

status=$?
# 130: saved after a signal. 75: the watchdog ended a step that hung. 2 is a mistake in the settings.
if [ ! -d "$OUT/model" ] && [ "$status" != 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
