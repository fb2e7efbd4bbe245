#!/bin/bash
#SBATCH --job-name=milesbatch-tiny
#SBATCH --time=60
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/me/runs/tiny/logs/slurm-run-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --comment=mark:run
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=8
#SBATCH --account=project_465000000
#SBATCH --partition=standard-g
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-node=8
#SBATCH --account=project_465000000
#SBATCH --partition=small-g

trap '' USR1
export GLOO_SOCKET_IFNAME=hsn0
export NCCL_SOCKET_IFNAME=hsn

exec /venv/bin/python -u -m milesbatch.jobs.control /scratch/me/runs/tiny --cause 'by hand: `submit`'
